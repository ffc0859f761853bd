"""Diffusion models: adding noise to images up to a timestep, and drawing images from noise.

A model predicts the noise ε in √ᾱ·x + √(1 − ᾱ)·ε, with β rising linearly from 1e−4 to 0.02 (Ho et al., 2020). The
first extra input of its target is the timestep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.numerics import Randomness
from stainlock.target import Target, evaluation_mode

_FIRST, _LAST = 1e-4, 0.02  # β of the first and the last timestep
_BATCH = 64


def kept(steps: int) -> Tensor:
    """ᾱ of every timestep."""
    return torch.cumprod(1 - torch.linspace(_FIRST, _LAST, steps, dtype=torch.float64), 0)


def timestep_of(target: Target) -> int:
    """The timestep at which the target runs its model."""
    if not target.extra_inputs or not isinstance(target.extra_inputs[0], Tensor | int):
        raise ModelError("expected a diffusion model: a Target whose extra_inputs begin with the timestep")
    return int(target.extra_inputs[0])


def noised(target: Target, images: Tensor, steps: int, seed: int) -> Tensor:
    """Images in [−1, 1] with the noise of the target's timestep added: the model's natural inputs."""
    share = float(kept(steps)[timestep_of(target)])
    noise = torch.randn(images.shape, generator=Randomness(seed).noise("noised images"))
    mixed: Tensor = share**0.5 * images + (1 - share) ** 0.5 * noise
    return mixed.clamp(*target.bounds)


def draw(target: Target, count: int, *, steps: int, visited: int, seed: int) -> Tensor:
    """``count`` images in [−1, 1], drawn from noise over ``visited`` evenly spaced timesteps of the model's ``steps``.

    The noise depends on the seed alone, not on the model.
    """
    generator = Randomness(seed).noise("diffusion")
    every = [round(i * (steps - 1) / (visited - 1)) for i in range(visited)]
    alphas = kept(steps)[every]
    x = torch.randn((count, *target.input_shape), generator=generator)
    with evaluation_mode(target.model), torch.inference_mode():
        for i in reversed(range(visited)):
            now, before = float(alphas[i]), float(alphas[i - 1]) if i else 1.0
            beta = 1 - now / before
            noise = torch.cat([_noise_in(target, part, every[i]) for part in x.split(_BATCH)])
            start = ((x - (1 - now) ** 0.5 * noise) / now**0.5).clamp(-1, 1)
            mean = (before**0.5 * beta * start + (1 - beta) ** 0.5 * (1 - before) * x) / (1 - now)
            spread = (beta * (1 - before) / (1 - now)) ** 0.5
            x = mean + spread * torch.randn(x.shape, generator=generator) if i else start
    return x


def _noise_in(target: Target, images: Tensor, timestep: int) -> Tensor:
    given = target.normalise(images)
    output: Any = target.model(given, torch.tensor([timestep], device=given.device), *target.extra_inputs[1:])
    noise: Tensor = output if isinstance(output, Tensor) else output.sample
    return noise.float().cpu()
