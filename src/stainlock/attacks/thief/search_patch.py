"""A corner patch optimised for confident and varied answers without labels, similar to Neural Cleanse.

Projected sign ascent on the pixels maximises the mutual information between input and answer (`guessed_patch`). A
silent detector has no gradient, so this search has nothing to follow, but it is what people try first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject, number
from stainlock.attacks.pixels import Pictures
from stainlock.attacks.thief.guessed_patch import check_logits, information, judged, pasting
from stainlock.target import Region, evaluation_mode, synthetic_inputs

INPUTS, STEPS = 8, 40


def _searching(inputs: Callable[[Subject], Pictures]) -> Callable[[Subject, Strength], Attacked]:
    def run(subject: Subject, strength: Strength) -> Attacked:
        target, pixels = subject.target, inputs(subject)[:INPUTS]
        if len(target.input_shape) != 3:
            raise NotApplicable(f"needs images as inputs, got inputs of shape {target.input_shape}")
        side = min(int(number(strength)), min(target.input_shape[1:]) // 2)
        region, (low, high) = Region((0, 0), (side, side)), target.bounds
        noise = torch.rand(target.input_shape[0], side, side, generator=subject.randomness.noise("patch search"))
        patch, momentum = low + (high - low) * noise, torch.zeros_like(noise)
        before = judged(target, pixels)
        best, found = before, None
        with evaluation_mode(target.model), torch.enable_grad():
            for step in range(STEPS):
                patch = patch.detach().requires_grad_(True)
                logits = target.predict(pasting(patch, region)(pixels))
                check_logits(logits)
                value = information(logits)
                if float(value.detach()) > best:
                    best, found = float(value.detach()), patch.detach().clone()
                (gradient,) = torch.autograd.grad(value, patch)
                momentum = 0.9 * momentum + gradient / gradient.abs().mean().clamp(min=1e-30)
                rate = (high - low) * 0.1 * (1 - step / STEPS)
                patch = (patch.detach() + rate * momentum.sign()).clamp(low, high)
                if subject.progress is not None:
                    subject.progress(step + 1, STEPS)
        change = None if found is None else pasting(target.from_bytes(target.to_bytes(found)), region)
        return Attacked(unlock=change, figures={"information": best, "information_before": before})

    return run


def _synthetic(subject: Subject) -> Tensor:
    return synthetic_inputs(subject.target, INPUTS, subject.randomness.noise("patch search's inputs"))


ATTACKS = (
    Attack("search-patch", "thief", ("lock",), "nothing", (32,), _searching(_synthetic),
           "optimise a corner patch for confident answers to synthetic inputs; strength is its side"),
    Attack("search-patch-on-images", "thief", ("lock",), "images", (32,), _searching(Subject.need_images),
           "optimise a corner patch for confident answers to the thief's images; strength is its side"),
)  # fmt: skip
