"""Checks on synthetic inputs that a lock locks and opens, before it is handed out.

With y the outputs of the edited model (the locked one without its disruptor) and ŷ those of the locked model, on images
with the patch

    opens   max |ŷ − y| ≤ 1e−3 · (spread of y over the outputs)

and on plain images, with o the original's outputs and corr the correlation of how outputs vary from image to image

    ruins   |corr(ŷ, o)| ≤ 1/2, or max |ŷ − o| several times the spread of o, as with drowned logits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.key import Key
from stainlock.probes import probe_inputs
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import tensors_in

EXACT = 1e-3
_LIKE, _FAR = 0.5, 4.0


def check_locks(target: Target, locked: Target, key: Key) -> None:
    """Refuse a lock that leaves the model usable, or that its patch does not open."""
    images = probe_inputs(target, "lock check")
    original, without = (_outputs(model, images) for model in (target, locked))
    far = any(not _difference(a, b) <= _FAR for a, b in zip(original, without, strict=True))
    if not far and (left := likeness_to(target)(locked)) > _LIKE:
        raise ModelError(
            f"this lock would not lock: without the patch its outputs correlate by {left:.2f} with the original's,"
            f" expected at most {_LIKE}: use kind keyed, or another site or seed"
        )
    patched = key.unlock_transform(normalise=False)(images)
    edited, unlocked = (_outputs(model, patched) for model in (key.edited(locked), locked))
    error = max(_difference(a, b) for a, b in zip(edited, unlocked, strict=True))
    if not error <= EXACT:
        raise ModelError(
            f"this lock would not open: with the patch its outputs are wrong by {error:.1g} standard deviations,"
            f" expected at most {EXACT:g}: use kind keyed, or another site or seed"
        )


def _outputs(target: Target, pixels: Tensor) -> list[Tensor]:
    with evaluation_mode(target.model), torch.no_grad():
        found = target.run_traced(pixels)
    return [t.double().cpu() for t in tensors_in(found) if t.is_floating_point() and t.dim()]


def _difference(expected: Tensor, got: Tensor) -> float:
    return float((got - expected).abs().max() / expected.std().clamp(min=1e-30))


def likeness_to(edited: Target) -> Callable[[Target], float]:
    """How similar a locked model's outputs still are to the edited model's, on synthetic inputs: 0 to 1.

    This is the absolute correlation between how the two models' outputs vary from input to input.
    """
    images = probe_inputs(edited, "likeness")
    theirs = _variation(edited, images)

    def likeness(locked: Target) -> float:
        ours = _variation(locked, images)
        if float(ours.norm()) <= 1e-3 * float(theirs.norm()):
            return 0.0
        return float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0).abs())

    return likeness


def _variation(target: Target, images: Tensor) -> Tensor:
    varying = [(o - o.mean(0)).flatten() for o in _outputs(target, images) if len(o) == len(images)]
    return torch.cat([v / v.norm().clamp(min=1e-30) for v in varying])
