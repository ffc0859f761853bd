"""Checks that a keyed lock cancels: with the patch the model is the original, with other bits it is not.

Let y be the original's outputs and ŷ the locked model's, both on images with the patch. Relative to the standard
deviation of y:

    exact    e = max |ŷ − y| ≤ 1e−3
    ruined   max |ŷ − y| > 0.1 where every bit of the patch is wrong

Permuted channels are summed in a different order, so ŷ is rounded differently. Some networks amplify rounding: their
outputs for one image alone and for the same image in a batch differ by more than 1e−3. So if e is larger, a copy of the
original in float64 is locked too: there rounding plays no part, and anything that does not cancel shows. In addition, e
must be of the size of r, the effect of rounding on the original itself:

    exact    max |ŷ₆₄ − y₆₄| ≤ 1e−6  and  e ≤ 8 r,   r = max |y − y₆₄|

A gate that does not cancel may have no effect on some images, so three kinds are tried: one with the spectrum of
photographs, noise, and uniform grey. They share a batch and a key; then the right key and a wrong one share a batch. In
a few models the images of a batch affect each other's outputs (timm's GCViT passes its global queries to the wrong
images): there the right key's output may change with the other image as much as the original's does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from stainlock.gating.structure import Structure
from stainlock.target import Target, evaluation_mode, probe_inputs, values_to_compare
from stainlock.unlocking.noise import NoiseUnlock
from stainlock.unlocking.patch import Unlock

_EXACT, _RUINED = 1e-3, 0.1
_EXACT_64, _ROUNDINGS = 1e-6, 8.0
# About this many values per image are compared of each layer's output in an object detector: its maps are large.
_MOST_VALUES = 2**16

IDLE = "without the patch its outputs hardly change, perhaps because they hardly depend on the image: check its weights"
_INEXACT = (
    "with the patch its outputs are wrong by {:.2g} standard deviations, expected at most {:g}: it may use weights in a"
    " way that a permutation of channels does not undo, so name other layers with --gates"
)


class Check:
    """Checks one lock, and each of its gates by itself. The original's outputs are computed once."""

    def __init__(self, target: Target, structure: Structure, trigger: Tensor) -> None:
        self.target = target
        self._layers = [gated.layer for gated in structure.gates] if target.normalises else []
        low, high = target.bounds
        grey = torch.full((1, *target.input_shape), (low + high) / 2)
        images = torch.cat([probe_inputs(target, "keyed check"), grey])
        wrong = 255 - trigger if structure.layout.form != "entries" else low + high - trigger
        right, other = (_unlock(target, structure, own) for own in (trigger, wrong))
        alike, mixed = right(images), torch.cat([right(images[:1]), other(images[:1])])
        seen = structure.layout.carrier == "patch"
        self._alike = _Batch(self, alike, alike if seen else images)
        self._mixed = _Batch(self, mixed, mixed if seen else torch.cat([images[:1]] * 2))

    def problem(self, locked: Target, lock: Callable[[Target], Target]) -> str | None:
        """What is wrong with the lock; None if the patch, and only the patch, restores the original. ``lock`` locks
        another copy in the same way."""
        error = _largest(self._alike.wanted, self.answers(locked, self._alike.images))
        mixed = self.answers(locked, self._mixed.images)
        right, wrong = (_largest(self._mixed.wanted, mixed, half) for half in (0, 1))
        if wrong <= _RUINED:
            return IDLE
        if right == math.inf or right <= _ROUNDINGS * self._shared:
            right = 0.0  # the other image changes the number of rows, or the original's own outputs
        rough = [(off, batch) for off, batch in ((error, self._alike), (right, self._mixed)) if off > _EXACT]
        return _INEXACT.format(max(error, right), _EXACT) if rough and not self._is_rounding(rough, lock) else None

    def answers(self, target: Target, images: Tensor) -> list[Tensor]:
        return answers(target, images, self._layers)

    def _is_rounding(self, rough: list[tuple[float, _Batch]], lock: Callable[[Target], Target]) -> bool:
        if self.target.dtype == torch.float64 or any(off > _ROUNDINGS * batch.rounding() for off, batch in rough):
            return False
        exact = self.answers(lock(self.exact_target), self._alike.images)
        return _largest(self._alike.wanted_exact, exact) <= _EXACT_64

    @cached_property
    def exact_target(self) -> Target:
        return in_float64(self.target)

    @cached_property
    def _shared(self) -> float:
        """How much the original's output for the first image depends on the others in its batch."""
        images = len(self._alike.images), len(self._mixed.images)
        pairs = zip(self._alike.wanted, self._mixed.wanted, strict=False)
        rows = [(a[0], b) for a, b in pairs if (len(a), len(b)) == images and a.shape[1:] == b.shape[1:] and a.numel()]
        return max((float((first - b[0]).abs().max()) / _spread(b) for first, b in rows), default=0.0)


class _Batch:
    """Images as the locked model gets them, and the original's outputs for what its network sees of them."""

    def __init__(self, check: Check, images: Tensor, seen: Tensor) -> None:
        self.images = images
        self._check, self._seen = check, seen

    @cached_property
    def wanted(self) -> list[Tensor]:
        return self._check.answers(self._check.target, self._seen)

    @cached_property
    def wanted_exact(self) -> list[Tensor]:
        return self._check.answers(self._check.exact_target, self._seen)

    def rounding(self) -> float:
        """r, or 0 if the model does not run in float64."""
        try:
            return _largest(self.wanted_exact, self.wanted)
        except Exception:  # the model's own code may require its dtype
            return 0.0


def in_float64(target: Target) -> Target:
    """A copy of the target that computes in float64."""
    extra = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in target.extra_inputs)
    return replace(target, model=target.copy().model.double(), extra_inputs=tuple(extra))


def answers(target: Target, pixels: Tensor, layers: Sequence[str] = ()) -> list[Tensor]:
    """The values to compare: the model's outputs, or for each image some of the outputs of the named layers."""
    found: list[Tensor] = []
    hooks = [
        target.model.get_submodule(name).register_forward_hook(lambda _, args, given: found.append(_some(given)))
        for name in layers
    ]
    try:
        with evaluation_mode(target.model), torch.no_grad():
            outputs = target.predict(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return values_to_compare(found or outputs)


def _some(given: Tensor) -> Tensor:
    values = given.flatten(1)
    return values[:, :: max(1, values.shape[1] // _MOST_VALUES)]


def _largest(wanted: list[Tensor], got: list[Tensor], half: int | None = None) -> float:
    """The largest difference relative to the standard deviation, over all rows or one half of them. Infinite if shapes
    differ, as when a model outputs a varying number of boxes."""
    if [a.shape for a in wanted] != [b.shape for b in got]:
        return math.inf
    found = []
    for a, b in zip(wanted, got, strict=True):
        differences = (b - a).abs() / _spread(a)
        if half is not None:
            differences = differences.chunk(2)[half] if len(a) % 2 == 0 and len(a) else differences[:0]
        found += [float(differences.max())] if differences.numel() else []
    return math.inf if any(map(math.isnan, found)) else max(found, default=0.0)


def _spread(values: Tensor) -> float:
    return max(float(values.std(correction=0)) if values.numel() else 0.0, 1e-12)


def _unlock(target: Target, structure: Structure, trigger: Tensor) -> Unlock | NoiseUnlock:
    """The function that puts this trigger into pixels."""
    if structure.layout.carrier == "entries":
        return NoiseUnlock(trigger, normalise=False)
    video = target.input_shape if len(target.input_shape) == 4 else None  # images may have several sizes
    carrier = structure.layout.carrier
    return Unlock(trigger, input_shape=video, bounds=target.bounds, normalise=False, carrier=carrier)
