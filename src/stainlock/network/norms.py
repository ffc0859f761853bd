"""Batch norms as affine maps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stainlock.tensors import exact, has


@dataclass(frozen=True)
class Affine:
    """The map ``p = g·y + h`` of a batch norm, channel by channel, in float64; the identity where there is none."""

    g: Tensor
    h: Tensor
    mean: Tensor  # of p over natural inputs, as the running statistics have it
    deviation: Tensor


def affine_of(norm: nn.Module) -> Affine:
    variance, running = exact(norm, "running_var"), exact(norm, "running_mean")
    gamma = exact(norm, "weight") if has(norm, "weight") else torch.ones_like(variance)
    beta = exact(norm, "bias") if has(norm, "bias") else torch.zeros_like(variance)
    scale = gamma / torch.sqrt(variance + float(getattr(norm, "eps", 0.0)))
    # Where the variance is next to nothing, eps keeps the output from spreading as far as γ.
    return Affine(scale, beta - scale * running, beta, scale.abs() * variance.sqrt())
