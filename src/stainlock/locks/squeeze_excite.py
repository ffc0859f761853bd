"""Algorithm 4: a lock in a squeeze-and-excite block, the model's own or a new one.

    1   φ maps inputs to what layer j is given
    2   stain layer j (Algorithm 2): the detector is silent for natural images
    3   the trigger patch π is what the detector's position sees of the trigger image
    6   a hidden unit of the block carries the signal: here two, whose difference is 0 locked and 1 unlocked,

            h₁ − h₂ = ρ(Gz − a) − ρ(Gz − a − 1),        z the pooled signal, after the activation,

    9   the gates' biases are wrong, and the signal takes that back: with a shift of every gate,

            τ₂ := τ₂ + shift,        S₂[·, 1] := −shift,        S₂[·, 2] := +shift

    10  what comes after the block does not see the signal: its own gate is closed

The paper makes the biases su + t, with u uniform on the sphere. What ruins a model depends on where the block is. Where
everything passes it, closed gates leave nothing; in a residual branch they do little, and gates of a new block that are
all open do most, since their usual gains are small. Elsewhere the outputs for inputs that need no data decide. (The
paper also prints γ before the activation, and + t in the column; see errata.)
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import SiteError
from stainlock.locks.parts.conduit import Tap
from stainlock.locks.parts.disguise import Disguise
from stainlock.locks.parts.gates import signed
from stainlock.network.blocks import Block
from stainlock.network.features import measured_input
from stainlock.network.network import Network
from stainlock.plan import CONDUIT, DISRUPTOR, Write, write
from stainlock.probes import probe_inputs
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import exact, raw, tensors_in

# Where a gate goes when locked: this far on the other side of its middle, or up to half as much again.
SHIFT = 4.0
# Of that, where a gate of either sign is closed, and where it is open: tanh needs less.
_SHUT, _OPEN = 1e-5, 0.4
# How far from its bend a hidden unit is kept: one for ReLU, and where smooth ones are straight or zero.
_MARGIN = {"relu": 1.0}
_SMOOTH_MARGIN = 16.0
# How much of that the disguise may use up, for inputs that need no data.
_HEARD = 0.1
# How much a hidden unit that is silent for inputs without data counts, in parts of the mean.
_ASLEEP = 0.01


# Which gates are opened and which closed when locked: all of them, none, or each to its other side.
Pattern = Literal["open", "close", "turn"]


class GateLock:
    """Line 6 to 10 for one block whose map carries the signal: two of its hidden units, and all its gates."""

    def __init__(self, network: Network, block: Block, taps: list[Tap], disguise: Disguise) -> None:
        self.network, self.block, self.taps, self.disguise = network, block, taps, disguise
        self.name = network.name(block.second)
        self.units = self._least_missed_units()
        self.height = self._height()

    def patterns(self, *, new: bool) -> tuple[Pattern, ...]:
        """What may ruin the model: all closed where nothing goes past the block, all open where new gates amplify."""
        if self.network.cuts(self.block.output):
            return ("close",)
        return ("open",) if new else ("turn", "open", "close")

    def _least_missed_units(self) -> tuple[int, int]:
        """The two hidden units whose columns carry least energy into the gates."""
        hidden = _given(self.network.target, self.name).square().mean(0)
        hidden += _ASLEEP * hidden.mean() + 1e-12  # a unit that sleeps for inputs without data may wake for others
        columns = exact(self.network.part.leaf(self.block.second), "weight").flatten(1).square().sum(0)
        if len(columns) < 4:
            raise SiteError(f"the block at {self.name} has {len(columns)} hidden units: expected at least 4")
        first, second = (hidden * columns).topk(2, largest=False).indices.tolist()
        return first, second

    def step_writes(self) -> list[Write]:
        """Line 6: the two units, which no gate listens to yet."""
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
                *(write(model, f"{name}.weight", (None, unit), 0.0, CONDUIT) for name in self.listeners),
            ]
        return writes

    @property
    def listeners(self) -> list[str]:
        """The layers that read the hidden units: the gates and, where there are some, the shifts."""
        return [self.network.name(node) for node in (self.block.second, self.block.shift) if node is not None]

    def _quiet(self, leak: Tensor, margin: float) -> Tensor:
        """Disguise no louder than a part of the margin: channels of a network whose maps are in the hundreds, as those
        of VGG on pixels up to 255, would drown the signal."""
        if self.disguise.bare:
            return leak
        heard = float((_given(self.network.target, self.network.name(self.block.first)) @ leak.flatten()).abs().max())
        return leak * min(1.0, _HEARD * margin / max(heard, 1e-30))

    def _height(self) -> float:
        """h₁ − h₂ when unlocked: 1 or, in disguise, what makes S₁ stand out as little as S₂."""
        if self.disguise.bare or self.block.hidden.name != "relu":
            return 1.0
        layers = (self.network.part.leaf(node) for node in (self.block.first, self.block.second))
        first, second = (exact(layer, "weight").square().mean().sqrt() for layer in layers)
        ratio = float(first.clamp(min=1e-6) / second.clamp(min=1e-6))
        return math.sqrt(SHIFT * ratio / (3 * max(tap.share for tap in self.taps)))

    def disruptor_writes(
        self, edited: Target, pattern: Pattern, scale: float, generator: np.random.Generator
    ) -> list[Write]:
        """Line 9: every gate far from where it belongs, until the signal comes."""
        layer = edited.model.get_submodule(self.name)
        bias, weight = exact(layer, "bias"), exact(layer, "weight").flatten(1)
        usual = (_given(edited, self.name) @ weight.T + bias).mean(0)
        size = torch.from_numpy(scale * generator.uniform(1.0, 1.5, len(bias)))
        writes = self._taken_back(edited, self.name, self._wrong_side(pattern, usual, generator) * size - usual)
        if self.block.shift is not None:
            name = self.network.name(self.block.shift)
            added = exact(edited.model.get_submodule(name), "bias")
            wrong = added.square().mean().sqrt() * signed(len(added), generator)
            writes += self._taken_back(edited, name, wrong - added)
        return writes

    def _wrong_side(self, pattern: Pattern, usual: Tensor, generator: np.random.Generator) -> Tensor:
        """Where each gate goes when locked, times its size: nothing here may tell how far open it is when unlocked."""
        if pattern == "turn":
            return torch.where(usual < 0, 1.0, -1.0).double()
        if self.block.gate.name == "tanh":  # closed in the middle, open on either side
            return signed(len(usual), generator) * (_OPEN if pattern == "open" else _SHUT)
        return torch.full_like(usual, 1.0 if pattern == "open" else -1.0)

    def _taken_back(self, edited: Target, name: str, wrong: Tensor) -> list[Write]:
        """A layer over the hidden units is off by something, and the signal takes that back."""
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
    """What a layer over pooled channels is given, in float64; by default for inputs that need no data."""
    if pixels is None:
        pixels = probe_inputs(target, "gate inputs")
    return measured_input(target, layer, pixels).flatten(1)


def likeness(locked: Target, edited: Target) -> float:
    """How much of the edited model's outputs is left in the locked one's, for inputs that need no data: 0 to 1.

    That is the correlation of how the outputs vary from one input to the next.
    """
    images = probe_inputs(edited, "likeness")
    ours, theirs = (_variation(target, images) for target in (locked, edited))
    if float(ours.norm()) <= 1e-3 * float(theirs.norm()):
        return 0.0
    return float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0).abs())


def _variation(target: Target, images: Tensor) -> Tensor:
    with evaluation_mode(target.model), torch.no_grad():
        outputs = tensors_in(target.run_traced(images))
    varying = [(o.double() - o.double().mean(0)).flatten() for o in outputs if len(o) == len(images)]
    return torch.cat([v / v.norm().clamp(min=1e-30) for v in varying])
