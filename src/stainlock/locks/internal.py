"""Algorithm 3: an internal lock for convolutional networks.

1   φ maps inputs to what layer j is given, r reads position (0, 0)
3   stain layer j (Algorithm 2) with the reduction map r: the detector is silent for natural images
4   the trigger patch π is what position (0, 0) sees of the trigger image
5   carry the detector's signal to the logits (`conduit`)
13  drown the logits, and let the signal take that back: with the logits' bias b, a vector u uniform on the sphere,
    a scale s and the signal γ that reaches the layer unlocked,

        bias    := su + t,
        column  := (b − su − t)/γ,

    so that a signal of γ restores b. (The paper prints + t in the column, which leaves the bias off by 2t.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.locks.parts.conduit import Tap
from stainlock.network.features import measured_input
from stainlock.network.network import Network
from stainlock.plan import DISRUPTOR, Write, write
from stainlock.probes import probe_inputs
from stainlock.sphere import sample_sphere
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import exact

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
        logits = target.predict(probe_inputs(target, "logits")).double()
    return float((logits.amax(1) - logits.amin(1)).max())


class LogitsLock:
    """Line 13: the disruptor in the logits layer, which reads the signal by some of its columns."""

    def __init__(self, network: Network, taps: list[Tap]) -> None:
        self.network, self.taps = network, taps
        self.name = network.name(network.logits)

    def scale(self, target: Target) -> float:
        """s such that one component of su is several times the range of the logits: their order is then su's."""
        classes = self.network.shapes[self.network.logits][1]
        return _DROWNING * math.sqrt(classes) * max(logits_range(target), 1e-6)

    def received(self, target: Target, pixels: Tensor) -> Tensor:
        """What the layer is given of the signal, for each input, in float64: 1 unlocked, but for rounding."""
        features = measured_input(target, self.name, pixels)
        return sum(
            (tap.share * features[:, tap.cell.channel] for tap in self.taps), torch.zeros(len(features)).double()
        )

    def disruptor_writes(self, edited: Target, s: float, gamma: float, generator: np.random.Generator) -> list[Write]:
        """The bias and the columns, with the sign of t (here 0) as it must be."""
        if not gamma > 0:
            raise ModelError(
                "the signal does not arrive at the logits: use a site of higher dimension, or a wider type"
            )
        layer = edited.model.get_submodule(self.name)
        b, weight = exact(layer, "bias"), exact(layer, "weight")
        u = draw_disruption(len(b), generator)
        column = (b - s * u) / gamma
        writes = [write(edited.model, f"{self.name}.bias", (None,), s * u, DISRUPTOR)]
        for tap in self.taps:
            own = weight[:, tap.cell.channel] + tap.share * column
            writes.append(write(edited.model, f"{self.name}.weight", (None, tap.cell.channel), own, DISRUPTOR))
        return writes
