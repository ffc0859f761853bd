"""lock(): one door to every kind of lock."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from stainlock.key import Key
from stainlock.locks.convolutional import lock_convolutional
from stainlock.locks.gan.lock import lock_generator
from stainlock.locks.keyed import lock_keyed
from stainlock.locks.vit.lock import lock_vit
from stainlock.target import Target
from stainlock.trigger import Progress

KINDS: dict[str, Callable[..., tuple[Target, Key]]] = {
    "keyed": lock_keyed,
    "internal": partial(lock_convolutional, kind="internal"),
    "squeeze-excite": partial(lock_convolutional, kind="squeeze-excite"),
    "vit": lock_vit,
    "gan": lock_generator,
}
DEFAULT = "keyed"


def lock(
    target: Target,
    *,
    kind: str = DEFAULT,
    seed: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Target, Key]:
    """A locked copy of the target, and the key that unlocks it. The target itself is left as it is.

    - ``kind``: ``keyed`` permutes channels by the bits of the patch, for every model. The paper's: ``internal`` drowns
      a classifier's logits (Algorithm 3), ``squeeze-excite`` turns the gates of a convolutional network (Algorithm 4),
      ``gan`` locks a generator (Algorithm 5), ``vit`` a vision transformer (Algorithm 6).
    - ``seed``: for experiments that must repeat; without it a secret one is drawn, which is what owners want.
    - ``options``: those of `lock_keyed`, `lock_convolutional`, `lock_generator` or `lock_vit`.
    """
    if kind not in KINDS:
        raise ValueError(f"expected kind {', '.join(KINDS)}, got {kind!r}")
    known = [name for name in inspect.signature(KINDS[kind]).parameters if name not in ("target", "kind")]
    if unknown := sorted(set(options) - set(known)):
        others = " or ".join(k for k, build in KINDS.items() if unknown[0] in inspect.signature(build).parameters)
        advice = f": name the kind that has it, {others}" if others else ""
        raise ValueError(f"expected options of a lock of kind {kind} ({', '.join(known)}), got {unknown[0]}{advice}")
    return KINDS[kind](target, seed=seed, progress=progress, **options)
