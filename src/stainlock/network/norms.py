"""Batch norm: all of its algebra.

With running mean μ and variance σ², scale γ and shift β, batch norm maps y to

    p = g·y + h,        g = γ / √(σ² + ε),        h = β − g·μ,

so that over the inputs it was trained on p has mean β and deviation |g|·σ. Functions that change a batch norm return
the new values of its parameters and buffers by name; a plan writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stainlock.tensors import exact, has

Values = dict[str, Tensor | float]
PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")
# The variance of a silent channel, in units of ε.
_FAINT = 0.01


@dataclass(frozen=True)
class Affine:
    """The map ``p = g·y + h`` channel by channel, in float64, and the mean and deviation of p in training."""

    g: Tensor
    h: Tensor
    mean: Tensor
    deviation: Tensor

    def span(self, start: int, channels: int) -> Affine:
        """Some of the channels."""
        own = slice(start, start + channels)
        return Affine(self.g[own], self.h[own], self.mean[own], self.deviation[own])


def is_batch_norm(module: nn.Module | None) -> bool:
    """Batch norm with fixed statistics, torchvision's frozen one included."""
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) or type(module).__name__ == "FrozenBatchNorm2d"
    return is_norm and getattr(module, "running_var", None) is not None


def lacks_statistics(module: nn.Module | None) -> bool:
    """Batch norm without running statistics: its outputs depend on the whole batch."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is None


def epsilon(norm: nn.Module) -> float:
    return float(getattr(norm, "eps", 0.0))


def affine_of(norm: nn.Module) -> Affine:
    variance, running = exact(norm, "running_var"), exact(norm, "running_mean")
    gamma = exact(norm, "weight") if has(norm, "weight") else torch.ones_like(variance)
    beta = exact(norm, "bias") if has(norm, "bias") else torch.zeros_like(variance)
    scale = gamma / torch.sqrt(variance + epsilon(norm))
    # Where the variance is next to nothing, ε keeps the output from spreading as far as γ.
    return Affine(scale, beta - scale * running, beta, scale.abs() * variance.sqrt())


def running_mean(norm: nn.Module) -> Tensor:
    return exact(norm, "running_mean")


def running_variance(norm: nn.Module) -> Tensor:
    return exact(norm, "running_var")


def deviation(norm: nn.Module) -> Tensor:
    """√(σ² + ε)."""
    return (exact(norm, "running_var") + epsilon(norm)).sqrt()
