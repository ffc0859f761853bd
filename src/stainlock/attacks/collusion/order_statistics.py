"""Order statistics of every weight: median, minimum, maximum, their midpoint, or either of them at random."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.collusion.coalition import Collusion


def _median(copies: Tensor, generator: torch.Generator) -> Tensor:
    """For an even number of copies, the mean of the two middle ones."""
    ordered = copies.sort(0).values
    return (ordered[(len(copies) - 1) // 2] + ordered[len(copies) // 2]) / 2


def _least(copies: Tensor, generator: torch.Generator) -> Tensor:
    return copies.amin(0)


def _greatest(copies: Tensor, generator: torch.Generator) -> Tensor:
    return copies.amax(0)


def _middle(copies: Tensor, generator: torch.Generator) -> Tensor:
    """If marks have two levels and both occur, this is the unmarked value."""
    return (copies.amin(0) + copies.amax(0)) / 2


def _either(copies: Tensor, generator: torch.Generator) -> Tensor:
    least, greatest = copies.amin(0), copies.amax(0)
    return torch.where(torch.rand(least.shape, generator=generator) < 0.5, least, greatest)


COLLUSIONS = (
    Collusion("median", _median, "the median of every weight"),
    Collusion("minimum", _least, "the minimum of every weight"),
    Collusion("maximum", _greatest, "the maximum of every weight"),
    Collusion("middle", _middle, "the midpoint between minimum and maximum of every weight"),
    Collusion("minimum-or-maximum", _either, "the minimum or maximum of every weight, at random"),
)
