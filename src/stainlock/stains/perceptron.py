"""Algorithm 1: staining a multilayer perceptron.

Neuron k of layer j has weights w (row k of W_j) and bias β. With the detector v and R = v·φ(x*):

    additive:   u = w + (Δ − β − w·φ(x*))/R · v,   β as it was
    otherwise:  β = δ,   u = (Δ − δ)/R · v

The same code serves neurons of transformers, where φ(x*) is read at one token.
"""

from __future__ import annotations

from torch import Tensor, nn

from stainlock.network.network import Site
from stainlock.plan import DETECTOR, Write, write
from stainlock.stains.detector import Levels


def replace_neuron(model: nn.Module, site: Site, k: int, v: Tensor, levels: Levels) -> list[Write]:
    """The non-additive stain: the neuron becomes the detector."""
    delta = levels.rest
    u = levels.slope * v  # (Δ − δ)/R is the slope
    return [
        write(model, f"{site.name}.weight", (k,), u, DETECTOR),
        write(model, f"{site.name}.bias", (k,), delta, DETECTOR),
    ]


def add_to_neuron(
    model: nn.Module, site: Site, k: int, v: Tensor, response: float, present: float, level: float
) -> list[Write]:
    """The additive stain: the detector is added to the neuron, whose pre-activation at x* was ``present``."""
    w = site.rows(model)[k].detach().double().cpu()
    u = w + (level - present) / response * v
    return [write(model, f"{site.name}.weight", (k,), u, DETECTOR)]
