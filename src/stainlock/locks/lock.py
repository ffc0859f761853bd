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
from stainlock.locks.vit.find import is_vit
from stainlock.locks.vit.lock import lock_vit
from stainlock.target import Target
from stainlock.trigger import Progress

KINDS: dict[str, Callable[..., tuple[Target, Key]]] = {
    "internal": partial(lock_convolutional, kind="internal"),
    "squeeze-excite": partial(lock_convolutional, kind="squeeze-excite"),
    "vit": lock_vit,
    "gan": lock_generator,
    "keyed": lock_keyed,
}


def fitting_kind(target: Target) -> str:
    """The lock for a model whose owner asks for none."""
    if target.input_shape[1:] == (1, 1):  # noise
        return "gan"
    return "vit" if is_vit(target) else "squeeze-excite"


def lock(
    target: Target,
    *,
    kind: str | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Target, Key]:
    """A locked copy of the target, and the key that unlocks it. The target itself is left as it is.

    - ``kind``: ``internal`` drowns a classifier's logits (Algorithm 3), ``squeeze-excite`` turns the gates of a
      convolutional network (Algorithm 4), ``gan`` locks a generator (Algorithm 5), ``vit`` a vision transformer
      (Algorithm 6). By default the one of these three that fits the model: gates leave a thief the least.
    - ``seed``: for experiments that must repeat; without it a secret one is drawn, which is what owners want.
    - ``options``: those of `lock_convolutional`, `lock_generator` or `lock_vit`, for instance ``site``.
    """
    kind = fitting_kind(target) if kind is None else kind
    if kind not in KINDS:
        raise ValueError(f"expected kind {', '.join(KINDS)}, got {kind!r}")
    known = [name for name in inspect.signature(KINDS[kind]).parameters if name not in ("target", "kind")]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"expected options of a lock of kind {kind} ({', '.join(known)}), got {unknown[0]}")
    return KINDS[kind](target, seed=seed, progress=progress, **options)
