"""Undoing a suspect's keyed lock: its weights in the order they had before the lock.

The lock's key restores the order of columns by the names of their tensors. If an exporter or a thief has renamed them,
each tensor of a fitting shape is reordered as if it were the stained layer's, and the detector is searched for in all
of them. The orders are independent of v, so the p-value holds once it is corrected for the additional rows, as for any
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from torch import Tensor

from stainlock.key import Key
from stainlock.target import Target

_MOST = 256  # reordered tensors to try


def opened_suspect(
    suspect: Target | Mapping[str, Tensor], lock_key: Key, sites: Sequence[str]
) -> Target | dict[str, Tensor]:
    """The suspect without this lock, to look for a stain at one of these ``sites``."""
    if isinstance(suspect, Target):
        return lock_key.opened(suspect)
    return lock_key.opened_weights(suspect) | _opened_without_names(lock_key, suspect, sites)


def _opened_without_names(lock_key: Key, weights: Mapping[str, Tensor], sites: Sequence[str]) -> dict[str, Tensor]:
    """Tensors in the orders that undo the lock at these ``sites``; in all of its orders if it has no such layer."""
    lost = [p for p in lock_key.revert.permutations if p.parameter not in weights]
    wanted = [p for p in lost if p.parameter in {f"{site}.weight" for site in sites}] or lost
    tried = (
        (f"{name} as {p.parameter}", p.of(tensor))
        for p in wanted
        for name, tensor in weights.items()
        if tensor.is_floating_point() and tensor.dim() > 1 and p.fits(tensor.shape)
    )
    return dict(islice(tried, _MOST))
