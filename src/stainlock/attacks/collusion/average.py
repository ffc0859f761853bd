"""Averages: equal, with random shares, with negative shares, with noise, and after aligning the copies."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.collusion.coalition import Collusion

_NOISE = 0.05  # relative to the tensor's RMS


def _average(copies: Tensor, generator: torch.Generator) -> Tensor:
    return copies.mean(0)


def _weighted(copies: Tensor, generator: torch.Generator) -> Tensor:
    """Shares drawn per tensor, uniformly among those that sum to 1 (Dirichlet)."""
    shares = -torch.log(1 - torch.rand(len(copies), generator=generator))
    return torch.einsum("k,k...->...", shares / shares.sum(), copies)


def _pushed_away(copies: Tensor, generator: torch.Generator) -> Tensor:
    """Twice the average of half the copies minus the average of the others, which then seem uninvolved."""
    half = (len(copies) + 1) // 2
    if half == len(copies):
        return copies[0]
    return 2 * copies[:half].mean(0) - copies[half:].mean(0)


def _noisy(copies: Tensor, generator: torch.Generator) -> Tensor:
    mean = copies.mean(0)
    return mean + _NOISE * mean.square().mean().sqrt() * torch.randn(mean.shape, generator=generator)


COLLUSIONS = (
    Collusion("average", _average, "the average of all copies"),
    Collusion("weighted-average", _weighted, "an average with random shares, drawn per tensor"),
    Collusion("pushed-away", _pushed_away, "an average in which half of the members have negative shares"),
    Collusion("average-and-noise", _noisy, "the average plus noise, 5 % of each tensor's RMS"),
    Collusion("align-then-average", _average, "copies aligned with the first in order and scale, then averaged", True),
)
