"""Majority: for every weight, the mean of the copies on the side of the average where most copies are."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.collusion.coalition import Collusion


def _majority(copies: Tensor, generator: torch.Generator) -> Tensor:
    mean = copies.mean(0)
    above = copies > mean
    most = above.float().mean(0) >= 0.5
    chosen = above == most
    total: Tensor = torch.where(chosen, copies, 0.0).sum(0) / chosen.sum(0).clamp(min=1)
    return torch.where(chosen.any(0), total, mean)


COLLUSION = Collusion("majority", _majority, "the mean of the copies on the side of the average where most are")
