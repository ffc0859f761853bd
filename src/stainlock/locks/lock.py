"""lock(): the entry point for every kind of lock."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, cast

from torch import Tensor

from stainlock.certificates.noise import NoiseName
from stainlock.key import Key
from stainlock.locks.gan.lock import lock_generator
from stainlock.locks.gan.switch import Paper
from stainlock.locks.internal import lock_internal
from stainlock.locks.keyed import lock_keyed
from stainlock.locks.parts.detectors import Place
from stainlock.locks.parts.disruptor import GateForm
from stainlock.locks.parts.draft import Blocks, Kernels
from stainlock.locks.squeeze_excite import lock_squeeze_excite
from stainlock.locks.vit.lock import Recipe, lock_vit
from stainlock.locks.vit.paper import Scaling
from stainlock.target import Target, check_editable
from stainlock.trigger import Progress

# To add a kind of lock, add a row here and its options to `LockOptions`.
KINDS: dict[str, Callable[..., tuple[Target, Key]]] = {
    "keyed": lock_keyed,
    "internal": lock_internal,
    "squeeze-excite": lock_squeeze_excite,
    "vit": lock_vit,
    "gan": lock_generator,
}
DEFAULT = "keyed"


class LockOptions(TypedDict, total=False):
    """The options of all kinds of locks. The function of each kind documents those that it takes."""

    # most kinds
    strength: float | None
    steps: int
    restarts: int
    firing_fraction: float | None
    # internal, squeeze-excite
    site: str | None
    count: int
    gates: str | int | Sequence[str] | None  # also keyed
    blocks: Blocks
    gate_form: GateForm
    place: Place
    conduit: Kernels
    obfuscate: bool
    # keyed
    bits: int | None
    tile: int | None
    patch: tuple[int, int] | None
    carrier: str | None
    rounds: int
    scatter: str | Sequence[str]
    # vit
    recipe: Recipe
    scaling: Scaling | None
    embedded: bool
    images: Tensor | None
    labels: Tensor | None
    # gan
    noise: NoiseName
    dimensions: int
    deviations: float
    channel: int | None
    discriminator: Target | Callable[[Tensor], Any] | None
    paper: Paper | None


def lock(
    target: Target,
    *,
    kind: str = DEFAULT,
    seed: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[LockOptions],
) -> tuple[Target, Key]:
    """A locked copy of the target, and the key that unlocks it. The target itself is not changed.

    - ``kind``: ``keyed`` permutes channels by the bits of the patch, and works for all kinds of models. The others are
      the paper's: ``internal`` drowns a classifier's logits (Algorithm 3), ``squeeze-excite`` disrupts the gates of a
      convolutional network (Algorithm 4), ``gan`` locks a generator (Algorithm 5), ``vit`` a vision transformer
      (Algorithm 6).
    - ``seed``: only for experiments that must be reproducible. By default a secret one is drawn.
    - ``options``: options of this kind: see `lock_keyed`, `lock_internal`, `lock_squeeze_excite`, `lock_generator`
      and `lock_vit`.

    >>> import stainlock as sl, torch
    >>> from torch import nn
    >>> layers = [nn.Conv2d(3, 32, 5), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
    >>> head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    >>> target = sl.Target(nn.Sequential(*layers, *head), (3, 32, 32))
    >>> locked, key = sl.lock(target, kind="internal", seed=0)
    >>> image = torch.rand(1, 3, 32, 32)
    >>> unlocked, edited = locked(key.unlock(image)), key.edited(locked)(key.unlock(image))
    >>> torch.allclose(unlocked, edited, atol=1e-3)
    True
    """
    if kind not in KINDS:
        raise ValueError(f"expected kind {', '.join(KINDS)}, got {kind!r}")
    known = [name for name in inspect.signature(KINDS[kind]).parameters if name != "target"]
    if unknown := sorted(set(options) - set(known)):
        others = " or ".join(k for k, build in KINDS.items() if unknown[0] in inspect.signature(build).parameters)
        advice = f": use kind {others}, which has it" if others else ""
        raise ValueError(f"expected options of a lock of kind {kind} ({', '.join(known)}), got {unknown[0]}{advice}")
    check_editable(target)
    return KINDS[kind](target, seed=seed, progress=progress, **cast("dict[str, Any]", options))
