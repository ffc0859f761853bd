"""Averages: of all copies alike, with random shares, with shares below zero, and of copies that were aligned first."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.collusion.coalition import Collusion

_NOISE = 0.05  # of the tensor's deviation


def _average(copies: Tensor, generator: torch.Generator) -> Tensor:
    return copies.mean(0)


def _weighted(copies: Tensor, generator: torch.Generator) -> Tensor:
    """Shares drawn anew for each tensor, uniformly among all that add up to 1 (Dirichlet)."""
    shares = -torch.log(1 - torch.rand(len(copies), generator=generator))
    return torch.einsum("k,k...->...", shares / shares.sum(), copies)


def _pushed_away(copies: Tensor, generator: torch.Generator) -> Tensor:
    """Twice the average of one half of the members less that of the others: these seem to have had no part in it."""
    half = (len(copies) + 1) // 2
    if half == len(copies):
        return copies[0]
    return 2 * copies[:half].mean(0) - copies[half:].mean(0)


def _noisy(copies: Tensor, generator: torch.Generator) -> Tensor:
    mean = copies.mean(0)
    return mean + _NOISE * mean.square().mean().sqrt() * torch.randn(mean.shape, generator=generator)


COLLUSIONS = (
    Collusion("average", _average, "the average of all copies"),
    Collusion("weighted-average", _weighted, "an average with random shares, others in each tensor"),
    Collusion("pushed-away", _pushed_away, "half of the members with shares below zero"),
    Collusion("average-and-noise", _noisy, "the average, and noise of 5 % of each tensor's deviation"),
    Collusion(
        "align-then-average", _average, "copies brought to the order and scale of the first, then averaged", True
    ),
)
