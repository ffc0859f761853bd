"""Staining a transposed convolution, in the paper's c×1×1 form.

The detector v' ∈ R^c is one tap of kernel k, which reads the input at one position. The other taps are zero: every
output pixel of the channel is either v'·φ at one input position or silent. Batch norm is handled as in Algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stainlock.network.network import Site
from stainlock.numerics import exact
from stainlock.plan import DETECTOR, Write, write
from stainlock.stains.convolution import scale, threshold, usable_scale
from stainlock.stains.detector import Levels, middle_tap


def replace_tap(model: nn.Module, site: Site, k: int, v: Tensor, levels: Levels) -> list[Write]:
    """The non-additive stain: one tap of the kernel becomes the detector, the others zero."""
    g, writes = usable_scale(model, site.norm, k, DETECTOR)
    weight = exact(site.layer(model), "weight")
    kernel = torch.zeros(weight.shape[0], *weight.shape[2:], dtype=torch.float64)
    row, column = middle_tap(model, site)
    kernel[:, row, column] = levels.slope / g * v
    writes.append(write(model, f"{site.name}.weight", (None, k), kernel, DETECTOR))
    return writes + threshold(model, site.name, site.norm, k, g, levels.rest, DETECTOR)


def add_to_tap(
    model: nn.Module, site: Site, k: int, v: Tensor, response: float, present: float, level: float
) -> list[Write]:
    """The additive stain: the detector is added to one tap."""
    row, column = middle_tap(model, site)
    weight = exact(site.layer(model), "weight")
    w = weight[:, k, row, column]
    u = w + (level - present) / (scale(model, site, k) * response) * v
    return [write(model, f"{site.name}.weight", (None, k, row, column), u, DETECTOR)]
