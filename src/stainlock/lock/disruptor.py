"""The disruptor: a bias that drowns the logits, and the column that takes it back when the signal comes.

With the logits' bias b, a vector u uniform on the sphere, a scale s and the signal γ that reaches the layer unlocked,

    bias    := su + t,
    column  := (b − su − t)/γ,

so that a signal of γ restores b. (The paper prints + t in the column, which leaves the unlocked bias off by 2t.)
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.lock.conduit import Conduit
from stainlock.lock.wires import Network
from stainlock.plan import Write, write
from stainlock.sites import _Reached, captured_input
from stainlock.sphere import sample_sphere
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import exact
from stainlock.trigger import synthetic_inputs

DISRUPTOR = "disruptor"
_PROBES = 8
# One component of su, in units of the widest range of logits found without data: natural images spread them
# up to four times wider.
_DROWNING = 12.0
# The largest component of u stands apart from the next by so much, in units of 1/√c: else the logits would decide
# between two classes, which is above chance where there are few.
_APART = 0.5
_DRAWS = 10_000


def draw_disruption(classes: int, generator: np.random.Generator) -> Tensor:
    """u, uniform on the part of the sphere where one component stands out: the locked model has one answer."""
    if classes < 2:
        raise ModelError(f"expected a classifier of at least 2 classes, got {classes}")
    for _ in range(_DRAWS):
        u = sample_sphere(1, classes, generator=generator)[0]
        first, second = u.topk(2).values.tolist()
        if (first - second) * classes**0.5 >= _APART:
            return u
    raise AssertionError("one draw in ten or so stands out")


def logits_range(target: Target) -> float:
    """The widest range between the largest and the smallest logit, on inputs that need no data."""
    with evaluation_mode(target.model), torch.no_grad():
        logits = target.predict(synthetic_inputs(target, _PROBES, torch.Generator().manual_seed(2))).double()
    return float((logits.amax(1) - logits.amin(1)).max())


def disruption_scale(target: Target, classes: int) -> float:
    """s such that one component of su is several times the range of the logits: their order is then su's."""
    return _DROWNING * math.sqrt(classes) * max(logits_range(target), 1e-6)


def received(target: Target, conduit: Conduit, pixels: Tensor) -> Tensor:
    """What the logits layer is given of the signal, for each input, in float64."""
    layer = target.model.get_submodule(conduit.network.name(conduit.network.logits))
    with captured_input(layer) as caught, evaluation_mode(target.model), torch.no_grad(), contextlib.suppress(_Reached):
        target.predict(pixels)
    features = caught[0].double().cpu()
    return sum((end.sign * features[:, end.cell.channel] for end in conduit.ends), torch.zeros(len(features)).double())


def disruptor_writes(
    network: Network, conduit: Conduit, u: Tensor, s: float, gamma: float, t: float = 0.0
) -> list[Write]:
    """Line 15 and 16 of the algorithm, with the sign of t as it must be."""
    if not gamma > 0:
        raise ModelError("the signal does not arrive at the logits: use a site of higher dimension, or a wider type")
    model, name = network.target.model, network.name(network.logits)
    b = exact(model.get_submodule(name), "bias")
    column = (b - s * u - t) / gamma
    writes = [write(model, f"{name}.bias", (None,), s * u + t, DISRUPTOR)]
    for end in conduit.ends:
        writes.append(write(model, f"{name}.weight", (None, end.cell.channel), end.sign * column, DISRUPTOR))
    return writes
