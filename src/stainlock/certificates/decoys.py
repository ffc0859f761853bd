"""Decoys: triggers of fresh random detectors, to compare with a key's."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from stainlock.key import Key
from stainlock.network.network import Site
from stainlock.numerics import Randomness, sample_sphere
from stainlock.target import Target
from stainlock.trigger import Progress, Trigger, find_triggers

# Number of decoys, and fewer for regions of more pixels than this, where the search takes long.
_DECOYS, _FEW_DECOYS, _SMALL_REGION = 96, 24, 128 * 128


def find_decoys(
    target: Target, site: Site, key: Key, count: int | None = None, progress: Progress | None = None
) -> list[Trigger]:
    """Triggers found in a model as the key's were, for fresh random detectors: inputs as unnatural as the key's."""
    if count is None:
        small = math.prod(key.detectors[0].trigger.region.size) <= _SMALL_REGION
        count = _DECOYS if small else _FEW_DECOYS
    reduction: Any = key.reduction
    return find_triggers(
        target, site, decoy_vectors(count, key), generator=Randomness(0).noise("decoys"), reduction=reduction,
        position=key.position or None, group=site.group_of(key.detectors[0].channel), progress=progress,
    )  # fmt: skip


def decoy_vectors(count: int, key: Key) -> Tensor:
    """The random detectors of ``count`` decoys, in order: ``(count, d)``."""
    return sample_sphere(count, key.dimension, generator=Randomness(0).secret("decoys"))
