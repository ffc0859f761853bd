"""Algorithm 2: staining a convolution, with or without batch normalisation.

Kernel k has the detector's shape (c_j, κ, κ). Under batch norm the pre-activation is g·(w∗φ + c) + h with
g = γ/σ and h = β − gμ, so that

    additive:   u = w + (Δ − p(x*))/(gR) · v
    otherwise:  u = α v with α = (Δ − δ)/(gR),  c = 0,  β = δ + gμ

If γ or σ² of the channel is far from the layer's median, a detector there would be easy to spot or carry no signal, so
g is computed with the median instead. μ and σ² become the detector's own statistics on synthetic inputs, with γ and β
to match, so that re-estimating them (in fine-tuning, or by a thief) changes little.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stainlock.network import norms
from stainlock.network.network import Site
from stainlock.numerics import has, raw
from stainlock.plan import DETECTOR, Write, write, write_values
from stainlock.stains.detector import Levels, Natural


def replace_kernel(model: nn.Module, site: Site, k: int, v: Tensor, levels: Levels, natural: Natural) -> list[Write]:
    """The non-additive stain: the kernel becomes the detector."""
    g, writes = usable_scale(model, site.norm, k, DETECTOR)
    alpha = levels.slope / g
    kernel = write(model, f"{site.name}.weight", (k,), (alpha * v).view(_kernel_shape(model, site)), DETECTOR)
    norm = model.get_submodule(site.norm) if site.norm else None
    if norm is None or not has(norm, "weight") or not has(norm, "bias"):
        return [*writes, kernel, *threshold(model, site.name, site.norm, k, g, levels.rest, DETECTOR)]
    return [kernel, *_own_statistics(model, site, k, g, alpha, levels.rest, natural)]


def _own_statistics(
    model: nn.Module, site: Site, k: int, g: float, alpha: float, rest: float, natural: Natural
) -> list[Write]:
    """Writes for a batch norm g·y + δ with the μ and σ² of the detector's own y."""
    mean, variance = alpha * natural.mean, (alpha * natural.deviation) ** 2
    values = norms.own_statistics(model.get_submodule(str(site.norm)), g, rest, mean, variance)
    writes = write_values(model, str(site.norm), (k,), values, DETECTOR)
    if has(site.layer(model), "bias"):
        writes.append(write(model, f"{site.name}.bias", (k,), 0.0, DETECTOR))
    return writes


def add_to_kernel(
    model: nn.Module, site: Site, k: int, v: Tensor, response: float, present: float, level: float
) -> list[Write]:
    """The additive stain: the detector is added to the kernel, whose pre-activation at x* was ``present``."""
    g = scale(model, site, k)
    w = site.rows(model)[k].detach().double().cpu()
    u = w + (level - present) / (g * response) * v
    return [write(model, f"{site.name}.weight", (k,), u.view(_kernel_shape(model, site)), DETECTOR)]


def threshold(model: nn.Module, layer: str, norm: str | None, k: int, g: float, delta: float, part: str) -> list[Write]:
    """Writes that make δ the pre-activation of a zero response: the layer's own bias 0, batch norm's β = δ + gμ."""
    if norm is None:
        return [write(model, f"{layer}.bias", (k,), delta, part)]
    writes = []
    if has(model.get_submodule(layer), "bias"):
        writes.append(write(model, f"{layer}.bias", (k,), 0.0, part))
    return [*writes, *shift(model, norm, k, g, delta, part)]


def shift(model: nn.Module, norm: str, k: int, g: float, delta: float, part: str) -> list[Write]:
    """Writes that make a batch norm map 0 to δ."""
    return write_values(model, norm, (k,), norms.shifted(model.get_submodule(norm), k, g, delta), part)


def scale(model: nn.Module, site: Site, k: int) -> float:
    """g of channel k, unchanged."""
    return float(norms.affine_of(model.get_submodule(site.norm)).g[k]) if site.norm else 1.0


def usable_scale(model: nn.Module, norm: str | None, k: int, part: str) -> tuple[float, list[Write]]:
    """g of channel k, and the writes that make it typical of the layer if it is not."""
    if norm is None:
        return 1.0, []
    g, values = norms.usable_scale(model.get_submodule(norm), k)
    return g, write_values(model, norm, (k,), values, part)


def _kernel_shape(model: nn.Module, site: Site) -> torch.Size:
    return raw(site.layer(model), "weight").shape[1:]
