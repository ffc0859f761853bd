"""The algebra of batch norm.

With running mean μ and variance σ², scale γ and shift β, batch norm maps y to

    p = g·y + h,        g = γ / √(σ² + ε),        h = β − g·μ.

Over the inputs it was trained on, p has mean β and standard deviation |g|·σ. Functions that change a batch norm return
the new values of its parameters and buffers by name; a plan writes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stainlock.numerics import exact, has

Values = dict[str, Tensor | float]
PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")
# The running variance given to a silent channel, in units of ε.
_FAINT = 0.01
# Variances that `without_statistics` writes: fp16, which some runtimes compute in, can represent them.
_LEAST_SCALE, _VARIANCES = 1e-12, (1e-4, 1e4)
# A scale or variance below this multiple of the layer's median, or above the inverse multiple, is not typical.
_ODD = 1 / 8


@dataclass(frozen=True)
class Affine:
    """The map ``p = g·y + h`` of each channel, in float64, and the mean and deviation of p in training."""

    g: Tensor
    h: Tensor
    mean: Tensor
    deviation: Tensor

    def span(self, start: int, channels: int) -> Affine:
        """A range of the channels."""
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
    # If the variance is small compared with ε, the output's deviation |g|·σ is well below γ.
    return Affine(scale, beta - scale * running, beta, scale.abs() * variance.sqrt())


def deviation(norm: nn.Module) -> Tensor:
    """√(σ² + ε)."""
    return (exact(norm, "running_var") + epsilon(norm)).sqrt()


def scales(norm: nn.Module) -> Tensor:
    """γ, or ones if the norm has none."""
    return exact(norm, "weight") if has(norm, "weight") else torch.ones_like(exact(norm, "running_var"))


def usable_scale(norm: nn.Module, channel: int) -> tuple[float, Values]:
    """g of a channel, and the values to write if γ or σ² is not typical of the layer; g is the one after these."""
    values: Values = {}
    variance = exact(norm, "running_var")
    sigma2 = float(variance[channel])
    if _is_odd(sigma2, float(variance.median())):
        sigma2 = float(variance.median())
        values["running_var"] = sigma2
    gamma = 1.0
    if has(norm, "weight"):
        gammas = exact(norm, "weight")
        gamma, typical = float(gammas[channel]), float(gammas.abs().median())
        if _is_odd(abs(gamma), typical):
            gamma = typical or 1.0
            values["weight"] = gamma
    return gamma / (sigma2 + epsilon(norm)) ** 0.5, values


def _is_odd(size: float, typical: float) -> bool:
    return not _ODD * typical < size < typical / _ODD


def typical_scale(norm: nn.Module) -> tuple[float, Values]:
    """g of a channel that has the layer's median γ and σ², and the values that make it so."""
    variance = float(exact(norm, "running_var").median())
    gamma = (float(exact(norm, "weight").abs().median()) or 1.0) if has(norm, "weight") else 1.0
    values: Values = {"running_var": variance}
    if has(norm, "weight"):
        values["weight"] = gamma
    return gamma / (variance + epsilon(norm)) ** 0.5, values


def zero_at(norm: nn.Module, response: float, g: float, level: float) -> Values:
    """A channel that maps this response to ``level``: μ is the response and β the level; without β, μ holds both."""
    if has(norm, "bias"):
        return {"running_mean": response, "bias": level}
    return {"running_mean": response - level / g}


def shifted(norm: nn.Module, channel: int, g: float, level: float) -> Values:
    """A channel that maps 0 to ``level``."""
    if not has(norm, "bias"):  # no β to write: μ holds the threshold instead
        return {"running_mean": -level / g}
    return {"bias": level + g * float(exact(norm, "running_mean")[channel])}


def own_statistics(norm: nn.Module, g: float, level: float, mean: float, variance: float) -> Values:
    """A channel g·y + level whose μ and σ² are those of its own y."""
    gamma = g * (variance + epsilon(norm)) ** 0.5
    return {"running_mean": mean, "running_var": variance, "weight": gamma, "bias": level + g * mean}


def silent(norm: nn.Module, g: float, level: float) -> Values:
    """A channel g·y + level with the statistics of a silent one; empty if the norm lacks γ, β or ε."""
    eps = epsilon(norm)
    if not (has(norm, "weight") and has(norm, "bias") and eps > 0):
        return {}
    variance = _FAINT * eps
    return {"running_mean": 0.0, "running_var": variance, "weight": g * math.sqrt(variance + eps), "bias": level}


def identity(norm: nn.Module, channel: int, below: float) -> Values:
    """A channel that returns its input. If β has to cancel μ, it is lowered by the fraction ``below`` of |μ|, so that
    rounding does not lift the output above zero."""
    if values := silent(norm, 1.0, 0.0):
        return values
    if not has(norm, "bias"):
        values = {"running_mean": 0.0}
    else:
        mean = exact(norm, "running_mean")[channel]
        values = {"bias": mean - below * mean.abs()}
    return values | ({"weight": deviation(norm)[channel]} if has(norm, "weight") else {})


def expecting_less(norm: nn.Module, mean: Tensor, variance: Tensor | None = None, *, most: float = 0.5) -> Values:
    """The norm after a layer whose outputs lost this mean and variance: later layers see the same mean and variance.

    ``most`` is the largest fraction of the variance that is subtracted.
    """
    values: Values = {"running_mean": exact(norm, "running_mean") - mean}
    if variance is not None and bool(variance.any()):
        usual = exact(norm, "running_var")
        values["running_var"] = usual - torch.minimum(variance, most * usual)
    return values


def moved_mean(norm: nn.Module, deviations: Tensor) -> Values:
    """The same function with μ moved by these multiples of √(σ² + ε); β compensates for it."""
    return {
        "running_mean": exact(norm, "running_mean") + deviation(norm) * deviations,
        "bias": exact(norm, "bias") + scales(norm) * deviations,
    }


def without_statistics(norm: nn.Module) -> Values:
    """The same function g·y + h with μ = 0, and σ² and γ that follow from g alone. Empty if the norm has no γ or β.

    γ gets one size for all channels, the median of |g|, as far as σ² can make up for it. With σ² the same for all
    channels, γ would be g, which a few silent channels make huge: noise relative to γ's spread would ruin the others.
    """
    if not (has(norm, "weight") and has(norm, "bias")):
        return {}
    affine, eps = affine_of(norm), epsilon(norm)
    size = affine.g.abs()
    typical = size.median().clamp(min=_LEAST_SCALE)
    variance = ((typical / size.clamp(min=_LEAST_SCALE)).square() - eps).clamp(*_VARIANCES)
    return {
        "running_mean": 0.0,
        "running_var": variance,
        "weight": affine.g * (variance + eps).sqrt(),
        "bias": affine.h,
    }


def rescaled(norm: nn.Module, factors: Tensor, added: Tensor, *, variance: bool) -> Values:
    """The norm after a layer whose outputs y became κ(y + added): (κy − κμ)/√(κ²(σ² + ε)) is the same for any κ."""
    values: Values = {"running_mean": factors * (exact(norm, "running_mean") + added)}
    if variance:
        eps = epsilon(norm)
        values["running_var"] = factors.square() * (exact(norm, "running_var") + eps) - eps
    return values


def least_factors(norm: nn.Module, least: float) -> Tensor:
    """The smallest factors κ for `rescaled` that leave σ² + ε at ``least``·ε or more."""
    eps = epsilon(norm)
    return (least * eps / (exact(norm, "running_var") + eps)).sqrt()


def has_shifts(norm: nn.Module, least: float) -> bool:
    """True if the root mean square of β is more than ``least`` times that of γ."""
    if not has(norm, "bias"):
        return False
    gamma = exact(norm, "weight") if has(norm, "weight") else torch.ones(1).double()
    return bool(exact(norm, "bias").square().mean() > least**2 * gamma.square().mean())


def response_variance(norm: nn.Module, rows: Tensor) -> float | None:
    """The mean of σ²/‖w_k‖² over the rows w_k of the layer before the norm: an estimate of the variance of a unit row's
    responses in training."""
    if not has(norm, "running_var"):
        return None
    variance, squares = exact(norm, "running_var"), rows.double().cpu().square().sum(1)
    if len(variance) != len(squares):
        return None
    alive = squares > 1e-6 * squares.median()
    return float((variance[alive] / squares[alive]).mean())
