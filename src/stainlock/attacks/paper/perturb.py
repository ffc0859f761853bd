"""Gaussian noise on every parameter, relative to the parameter's standard deviation."""

from __future__ import annotations

import torch
from torch import nn

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject, number
from stainlock.attacks.changes import corollary, edited


def _run(subject: Subject, strength: Strength) -> Attacked:
    generator = subject.randomness.noise(f"perturbation {strength}")

    def change(model: nn.Module) -> None:
        for parameter in model.parameters():
            spread = parameter.double().std(unbiased=False) if parameter.numel() > 1 else parameter.double().abs().sum()
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((number(strength) * spread.cpu() * noise).to(parameter))

    noisy = edited(subject.target, change)
    return Attacked(noisy, figures=corollary(subject, noisy))


ATTACK = Attack("perturb", "paper", ("stain", "lock"), "nothing", (0.01, 0.03, 0.1, 0.2, 0.3), _run,
                "add Gaussian noise to all parameters; strength is relative to their standard deviations")  # fmt: skip
