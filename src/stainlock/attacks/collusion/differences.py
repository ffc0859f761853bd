"""Removes marks where copies differ, since a difference reveals a mark.

Fingerprints are in every weight, so copies differ nearly everywhere, and zeroing all differences would zero the model.
The thief therefore takes only the fifth of each tensor's weights where copies differ most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.collusion.coalition import Collusion

_SHARE = 0.2  # fraction of each tensor's weights: those that differ most


def _differing(copies: Tensor) -> Tensor:
    spread = (copies.amax(0) - copies.amin(0)).flatten()
    count = max(1, int(_SHARE * spread.numel()))
    return (spread >= spread.topk(count).values[-1]).view(copies.shape[1:]) & (spread > 0).view(copies.shape[1:])


def _zeroed(copies: Tensor, generator: torch.Generator) -> Tensor:
    return torch.where(_differing(copies), 0.0, copies[0])


def _noise(copies: Tensor, generator: torch.Generator) -> Tensor:
    """There, uniform noise between the copies' minimum and maximum."""
    low, high = copies.amin(0), copies.amax(0)
    noise = low + (high - low) * torch.rand(low.shape, generator=generator)
    return torch.where(_differing(copies), noise, copies[0])


def _all_noise(copies: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform noise between the copies' minimum and maximum everywhere."""
    low, high = copies.amin(0), copies.amax(0)
    return low + (high - low) * torch.rand(low.shape, generator=generator)


COLLUSIONS = (
    Collusion("differences-zeroed", _zeroed, "set the fifth of the weights where copies differ most to zero"),
    Collusion("differences-to-noise", _noise, "set the fifth where copies differ most to noise within their range"),
    Collusion("noise-between", _all_noise, "every weight at random between the copies' minimum and maximum"),
)
