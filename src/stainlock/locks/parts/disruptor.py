"""Disruptors: weights that ruin the outputs until the signal restores them, in the logits layer or in gates.

Logits: with bias b, a unit vector u, a strength s and the signal γ that reaches the layer when unlocked,

    bias := su,        column := (b − su)/γ,        so that a signal of γ restores b.

Gates of a squeeze-and-excite block σ(S₂ h(S₁ pool(x) + τ₁) + τ₂): two hidden units make the pooled signal z a step,

    h₁ − h₂ = ρ(Gz − a) − ρ(Gz − a − 1),        0 when locked, 1 when unlocked,

and a shift moves every gate to where it ruins the model, unless the step cancels it:

    τ₂ := τ₂ + shift,        S₂[·, 1] := −shift,        S₂[·, 2] := +shift.

Which shift ruins a model depends on where the block is. If every path passes through it, closed gates leave nothing. In
a residual branch closed gates change little, and the gates of a new block do most damage when they are all open, since
their usual gains are small. Otherwise the shift is chosen by its effect on the outputs for synthetic inputs.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import ModelError, SiteError
from stainlock.locks.check import likeness_to
from stainlock.locks.parts.conduit import Disguise, Tap
from stainlock.locks.parts.gates import signed
from stainlock.network.blocks import Block
from stainlock.network.features import measured_input
from stainlock.network.network import Network
from stainlock.plan import CONDUIT, DISRUPTOR, Plan, Write, write
from stainlock.probes import probe_inputs
from stainlock.randomness import Randomness
from stainlock.sphere import sample_sphere
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import exact, raw

# A typical component of su, in units of the widest range of logits on synthetic inputs: on natural images the range is
# up to four times wider.
_DROWNING = 12.0
# The largest component of u exceeds the next by this much, in units of 1/√c: otherwise the logits would decide between
# two classes, which is above chance if there are few.
_APART = 0.5
_DRAWS = 10_000
# Distance of a locked gate's level from its midpoint, on the wrong side; drawn between this and 1.5 times this.
SHIFT = 4.0
# Factors of that distance for tanh gates: closed near the midpoint, open at less, since tanh saturates sooner.
_SHUT, _OPEN = 1e-5, 0.4
# Distance of a hidden unit from its activation's bend: 1 for ReLU; smooth activations are linear or 0 further out.
_MARGIN = {"relu": 1.0}
_SMOOTH_MARGIN = 16.0
# Fraction of that distance that the disguise may use up on synthetic inputs.
_HEARD = 0.1
# Added to the energy of hidden units, as a fraction of its mean: natural inputs may excite units that are silent here.
_ASLEEP = 0.01
# Tolerance for the signal at a gate, which is 1 up to rounding in half precision.
_STEP_ERROR = 1e-2
# One block's gates ruin the outputs if these correlate by at most this with the edited model's.
_RUINED = 0.1

# Which gates are open and which closed when locked: all open, all closed, or each on its opposite side.
Pattern = Literal["open", "close", "turn"]


def draw_disruption(classes: int, generator: np.random.Generator) -> Tensor:
    """u, uniform on the part of the sphere where one component stands out: the locked model always gives one answer."""
    if classes < 2:
        raise ModelError(f"expected a classifier of at least 2 classes, got {classes}")
    for _ in range(_DRAWS):
        u = sample_sphere(1, classes, generator=generator)[0]
        first, second = u.topk(2).values.tolist()
        if (first - second) * classes**0.5 >= _APART:
            return u
    raise AssertionError("one draw in ten or so stands out")


def logits_range(target: Target) -> float:
    """The widest range between the largest and the smallest logit, on synthetic inputs."""
    with evaluation_mode(target.model), torch.no_grad():
        logits = target.predict(probe_inputs(target, "logits")).double()
    return float((logits.amax(1) - logits.amin(1)).max())


class LogitsDisruptor:
    """The disruptor in the logits layer, which reads the signal by some of its columns."""

    def __init__(self, network: Network, taps: list[Tap]) -> None:
        self.network, self.taps = network, taps
        self.name = network.name(network.logits)
        self.classes = network.shapes[network.logits][1]

    def strength(self, target: Target) -> float:
        """s such that one component of su is several times the range of the logits: their order is then that of su."""
        return _DROWNING * math.sqrt(self.classes) * max(logits_range(target), 1e-6)

    def received(self, target: Target, pixels: Tensor) -> Tensor:
        """The signal that reaches the layer, for each input, in float64: 1 when unlocked, up to rounding."""
        features = measured_input(target, self.name, pixels)
        return sum(
            (tap.share * features[:, tap.cell.channel] for tap in self.taps), torch.zeros(len(features)).double()
        )

    def writes(self, edited: Target, s: float, u: Tensor, gamma: float) -> list[Write]:
        """The bias su, and the columns that restore b for a signal of γ."""
        if not gamma > 0:
            raise ModelError("the signal does not reach the logits: use a site of higher dimension, or a wider type")
        layer = edited.model.get_submodule(self.name)
        b, weight = exact(layer, "bias"), exact(layer, "weight")
        column = (b - s * u) / gamma
        writes = [write(edited.model, f"{self.name}.bias", (None,), s * u, DISRUPTOR)]
        for tap in self.taps:
            own = weight[:, tap.cell.channel] + tap.share * column
            writes.append(write(edited.model, f"{self.name}.weight", (None, tap.cell.channel), own, DISRUPTOR))
        return writes


class GateDisruptor:
    """The disruptor in one block whose map carries the signal: two of its hidden units, and all its gates.

    ``new``: the block was inserted for the lock.
    """

    def __init__(self, network: Network, block: Block, taps: list[Tap], disguise: Disguise, *, new: bool) -> None:
        self.network, self.block, self.taps, self.disguise, self.new = network, block, taps, disguise, new
        self.name = network.name(block.second)
        self.units = self._cheapest_units()
        self.height = self._height()

    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns to try: all closed if nothing bypasses the block, all open if new gates amplify."""
        if self.network.cuts(self.block.output):
            return ("close",)
        return ("open",) if self.new else ("turn", "open", "close")

    def _cheapest_units(self) -> tuple[int, int]:
        """The two hidden units that cost least: those whose columns carry the least energy into the gates."""
        hidden = _given(self.network.target, self.name).square().mean(0)
        hidden += _ASLEEP * hidden.mean() + 1e-12
        columns = exact(self.network.part.leaf(self.block.second), "weight").flatten(1).square().sum(0)
        if len(columns) < 4:
            raise SiteError(f"the block at {self.name} has {len(columns)} hidden units: expected at least 4")
        first, second = (hidden * columns).topk(2, largest=False).indices.tolist()
        return first, second

    def step_writes(self) -> list[Write]:
        """The step's two units, which no gate reads yet."""
        model, first = self.network.target.model, self.network.name(self.block.first)
        weight = raw(self.network.part.leaf(self.block.first), "weight")
        margin, height = _MARGIN.get(self.block.hidden.name, _SMOOTH_MARGIN), self.height
        row = height * self._quiet(self.disguise.leaking(first, weight, tuple(weight.shape[1:])), margin)
        for tap in self.taps:
            row[tap.cell.channel] = height * (2 * margin + 1) * tap.share
        writes = []
        for unit, start in zip(self.units, (margin, margin + 1), strict=True):
            writes += [
                write(model, f"{first}.weight", (unit,), row, CONDUIT),
                write(model, f"{first}.bias", (unit,), -height * start, CONDUIT),
                *(write(model, f"{name}.weight", (None, unit), 0.0, CONDUIT) for name in self.readers),
            ]
        return writes

    @property
    def readers(self) -> list[str]:
        """The layers that read the hidden units: the gates and, if there are any, the shifts."""
        return [self.network.name(node) for node in (self.block.second, self.block.shift) if node is not None]

    def _quiet(self, leak: Tensor, margin: float) -> Tensor:
        """The disguise, scaled down to use at most a fraction of the margin. Otherwise maps with values in the
        hundreds, as in VGG on pixels up to 255, would drown the signal."""
        if self.disguise.bare:
            return leak
        heard = float((_given(self.network.target, self.network.name(self.block.first)) @ leak.flatten()).abs().max())
        return leak * min(1.0, _HEARD * margin / max(heard, 1e-30))

    def _height(self) -> float:
        """h₁ − h₂ when unlocked: 1 or, with a disguise, the height for which S₁ stands out as little as S₂."""
        if self.disguise.bare or self.block.hidden.name != "relu":
            return 1.0
        layers = (self.network.part.leaf(node) for node in (self.block.first, self.block.second))
        first, second = (exact(layer, "weight").square().mean().sqrt() for layer in layers)
        ratio = float(first.clamp(min=1e-6) / second.clamp(min=1e-6))
        return math.sqrt(SHIFT * ratio / (3 * max(tap.share for tap in self.taps)))

    def check_signal(self, edited: Target, patched: Tensor) -> None:
        """Refuse a lock whose step is not 1 for images with the patch."""
        if float((self.step(edited, patched) - 1).abs().max()) > _STEP_ERROR:
            raise ModelError(f"the signal does not reach the gates {self.name}: use another site, or a wider type")

    def writes(self, edited: Target, strength: float | None, randomness: Randomness) -> list[Write]:
        """The pattern that ruins the outputs most, at the smallest of a few strengths that is enough."""
        patterns, left, best = self.patterns(), math.inf, list[Write]()
        # Nothing to compare: one pattern, and a given strength or closed tanh gates, which are 0 at any strength.
        known = len(patterns) == 1 and (strength or self.block.gate.name == "tanh")
        likeness, usual = None if known else likeness_to(edited), self._usual(edited)
        for shift in (strength,) if strength else (SHIFT, 2 * SHIFT, 4 * SHIFT):
            for pattern in patterns:
                own = self._pattern_writes(edited, usual, pattern, shift, randomness.secret(f"disruptor {self.name}"))
                found = likeness(Plan(tuple(own)).apply(edited)) if likeness else 0.0
                if found < left:
                    left, best = found, own
            if left <= _RUINED:
                break
        return best

    def _usual(self, edited: Target) -> Tensor:
        """The mean level of each gate, before its activation."""
        layer = edited.model.get_submodule(self.name)
        weight = exact(layer, "weight").flatten(1)
        return (_given(edited, self.name) @ weight.T + exact(layer, "bias")).mean(0)

    def _pattern_writes(
        self, edited: Target, usual: Tensor, pattern: Pattern, shift: float, generator: np.random.Generator
    ) -> list[Write]:
        """Writes that move every gate by the pattern until the signal cancels that."""
        size = torch.from_numpy(shift * generator.uniform(1.0, 1.5, len(usual)))
        writes = self._taken_back(edited, self.name, self._wrong_side(pattern, usual, generator) * size - usual)
        if self.block.shift is not None:
            name = self.network.name(self.block.shift)
            added = exact(edited.model.get_submodule(name), "bias")
            wrong = added.square().mean().sqrt() * signed(len(added), generator)
            writes += self._taken_back(edited, name, wrong - added)
        return writes

    def _wrong_side(self, pattern: Pattern, usual: Tensor, generator: np.random.Generator) -> Tensor:
        """Each gate's level when locked, in units of its size; it must not reveal how far open it is when unlocked."""
        if pattern == "turn":
            return torch.where(usual < 0, 1.0, -1.0).double()
        if self.block.gate.name == "tanh":  # closed in the middle, open on either side
            return signed(len(usual), generator) * (_OPEN if pattern == "open" else _SHUT)
        return torch.full_like(usual, 1.0 if pattern == "open" else -1.0)

    def _taken_back(self, edited: Target, name: str, wrong: Tensor) -> list[Write]:
        """Make a layer over the hidden units wrong by this much, and let the step cancel it."""
        layer, model = edited.model.get_submodule(name), edited.model
        wrong[[tap.cell.channel for tap in self.taps]] = 0.0  # the signal's own channel stays as it is
        wrong = wrong.to(raw(layer, "bias").dtype).double()
        column = (wrong / self.height).view(-1, *(1,) * (raw(layer, "weight").dim() - 2))
        return [
            write(model, f"{name}.bias", (None,), exact(layer, "bias") + wrong, DISRUPTOR),
            write(model, f"{name}.weight", (None, self.units[0]), -column, DISRUPTOR),
            write(model, f"{name}.weight", (None, self.units[1]), column, DISRUPTOR),
        ]

    def step(self, target: Target, pixels: Tensor) -> Tensor:
        """h₁ − h₂ for each input, in units of its height: 0 locked, 1 unlocked."""
        hidden = _given(target, self.name, pixels)
        return (hidden[:, self.units[0]] - hidden[:, self.units[1]]) / self.height


def _given(target: Target, layer: str, pixels: Tensor | None = None) -> Tensor:
    """The input of a layer over pooled channels, in float64; by default for synthetic inputs."""
    if pixels is None:
        pixels = probe_inputs(target, "gate inputs")
    return measured_input(target, layer, pixels).flatten(1)
