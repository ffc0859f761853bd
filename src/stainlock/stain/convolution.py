"""Algorithm 2: staining a convolution, with or without batch normalisation.

Kernel k has the detector's shape (c_j, κ, κ). Under batch norm the pre-activation is g·(w∗φ + c) + h with
g = γ/σ and h = β − gμ, so that

    additive:   u = w + (Δ − p(x*))/(gR) · v
    otherwise:  u = α v with α = (Δ − δ)/(gR),  c = 0,  β = δ + gμ

A channel that batch norm has all but switched off (γ or σ² far from the layer's) makes a beacon of its own, or carries
no signal: γ and σ² are set to the layer's median first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stainlock.harm import affine_of
from stainlock.plan import Write, write
from stainlock.sites import Site
from stainlock.stain.levels import Levels
from stainlock.stain.perceptron import DETECTOR
from stainlock.tensors import exact, has, raw

_ODD = 1 / 8  # of the layer's median, or its inverse


def replace_kernel(model: nn.Module, site: Site, k: int, v: Tensor, levels: Levels) -> list[Write]:
    """The non-additive stain: the kernel becomes the detector."""
    g, writes = usable_scale(model, site, k)
    u = levels.slope / g * v  # α v
    writes.append(write(model, f"{site.name}.weight", (k,), u.view(_kernel_shape(model, site)), DETECTOR))
    return writes + threshold(model, site, k, g, levels.rest)


def add_to_kernel(
    model: nn.Module, site: Site, k: int, v: Tensor, response: float, present: float, level: float
) -> list[Write]:
    """The additive stain: the detector is added to the kernel, whose pre-activation at x* was ``present``."""
    g = scale(model, site, k)
    w = site.rows(model)[k].detach().double().cpu()
    u = w + (level - present) / (g * response) * v
    return [write(model, f"{site.name}.weight", (k,), u.view(_kernel_shape(model, site)), DETECTOR)]


def threshold(model: nn.Module, site: Site, k: int, g: float, delta: float) -> list[Write]:
    """Writes that make δ the pre-activation of a zero response: the layer's own bias 0, batch norm's β = δ + gμ."""
    layer = site.layer(model)
    if site.norm is None:
        return [write(model, f"{site.name}.bias", (k,), delta, DETECTOR)]
    norm = model.get_submodule(site.norm)
    mu = float(exact(norm, "running_mean")[k])
    writes = [] if not has(layer, "bias") else [write(model, f"{site.name}.bias", (k,), 0.0, DETECTOR)]
    if not has(norm, "bias"):  # no β to write: μ holds the threshold instead
        return [*writes, write(model, f"{site.norm}.running_mean", (k,), -delta / g, DETECTOR)]
    return [*writes, write(model, f"{site.norm}.bias", (k,), delta + g * mu, DETECTOR)]


def scale(model: nn.Module, site: Site, k: int) -> float:
    """g of channel k, as it is."""
    return float(affine_of(model.get_submodule(site.norm)).g[k]) if site.norm else 1.0


def usable_scale(model: nn.Module, site: Site, k: int) -> tuple[float, list[Write]]:
    """g of channel k, and the writes that make it typical where it is far from the layer's."""
    if site.norm is None:
        return 1.0, []
    norm = model.get_submodule(site.norm)
    writes = []
    variance = exact(norm, "running_var")
    sigma2 = float(variance[k])
    if _is_odd(sigma2, float(variance.median())):
        sigma2 = float(variance.median())
        writes.append(write(model, f"{site.norm}.running_var", (k,), sigma2, DETECTOR))
    gamma = 1.0
    if has(norm, "weight"):
        gammas = exact(norm, "weight")
        gamma, typical = float(gammas[k]), float(gammas.abs().median())
        if _is_odd(abs(gamma), typical):
            gamma = typical or 1.0
            writes.append(write(model, f"{site.norm}.weight", (k,), gamma, DETECTOR))
    return gamma / (sigma2 + float(getattr(norm, "eps", 0.0))) ** 0.5, writes


def _is_odd(size: float, typical: float) -> bool:
    return not _ODD * typical < size < typical / _ODD


def _kernel_shape(model: nn.Module, site: Site) -> torch.Size:
    return raw(site.layer(model), "weight").shape[1:]
