"""Synthetic inputs, used in estimates instead of natural images, so that no data is needed."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.target import Target

# For each purpose, the number of inputs and their seed. Fixed seeds make estimates repeatable.
_PURPOSES = {
    "channel cost": (4, 0),
    "natural responses": (2, 1),  # one of each kind is enough, since every position gives a response
    "lock responses": (4, 1),
    "tokens": (8, 1),
    "logits": (8, 2),
    "patched": (4, 3),
    "gate inputs": (8, 4),
    "gate shifts": (8, 5),
    "likeness": (8, 6),
    "exported": (4, 7),
    "lock check": (4, 8),
    "keyed check": (2, 5),  # one of each kind
}


def probe_inputs(target: Target, purpose: str) -> Tensor:
    """The fixed synthetic inputs for a purpose."""
    count, seed = _PURPOSES[purpose]
    return synthetic_inputs(target, count, torch.Generator().manual_seed(seed))


def synthetic_inputs(target: Target, count: int, generator: torch.Generator) -> Tensor:
    """Synthetic inputs within the bounds: half with the 1/f spectrum of photographs, half plain noise."""
    low, high = target.bounds
    shape = (count, *target.input_shape)
    noise = torch.rand(shape, generator=generator, dtype=torch.float64)
    half = (count + 1) // 2
    if len(target.input_shape) == 3 and min(target.input_shape[1:]) >= 8:
        noise[:half] = _pink(noise[:half], generator)
    elif len(target.input_shape) == 4 and min(target.input_shape[2:]) >= 8:  # video: every frame is the same image
        noise[:half] = _pink(noise[:half, :, 0], generator)[:, :, None]
    return noise.mul_(high - low).add_(low).float()  # in place, here and below: allocation would dominate the time


def _pink(white: Tensor, generator: torch.Generator) -> Tensor:
    height, width = white.shape[-2:]
    frequency = torch.hypot(
        torch.fft.fftfreq(height, dtype=torch.float64)[:, None],
        torch.fft.rfftfreq(width, dtype=torch.float64),
    ).clamp(min=1 / max(height, width))
    spectrum = torch.fft.rfft2(white - 0.5).div_(frequency)
    field: Tensor = torch.fft.irfft2(spectrum, s=(height, width))
    grey = field.mean(1, keepdim=True)  # in photographs the colour channels are correlated
    field.sub_(grey).mul_(0.5).add_(grey)
    spread = field.flatten(1).std(1).view(-1, 1, 1, 1)
    brightness = 0.3 + 0.4 * torch.rand(len(white), 1, 1, 1, generator=generator, dtype=torch.float64)
    field.sub_(field.mean((-1, -2), keepdim=True)).mul_(0.25).div_(spread).add_(brightness)
    return field.clamp_(0, 1)
