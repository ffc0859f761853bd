"""The conduit: the channels that carry the detectors' signal, and what it amounts to wherever it is read.

Where a dense classifier has a hidden layer, two of its units make the signal binary,

    ReLU(Gz − a) − ReLU(Gz − a − 1):   0 when locked, exactly 1 when unlocked, whatever the background.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from stainlock.locks.parts.disguise import BARE, Disguise
from stainlock.locks.parts.route import Channels, Wire, behind_activation
from stainlock.network.blocks import Block
from stainlock.network.network import Network
from stainlock.network.norms import is_batch_norm
from stainlock.network.object_detectors import area_growth
from stainlock.network.signals import Cell, gain
from stainlock.network.sites import Site
from stainlock.tensors import has

# Gz, and a: unlocked, the two units give 2 and 1.
STEP_INPUT, STEP_START = 3.0, 1.0
_STEP_OUTPUTS = [STEP_INPUT - STEP_START, STEP_INPUT - STEP_START - 1]
# A capped activation is left room, so that it does not show by its constant.
_BELOW_CEILING = 0.75
# A weaker signal is raised to this, so that what pooling leaves of it is no tiny number.
_SIGNAL = 5.0
# A gate that the signal goes through is all but open, and one it must not go through all but closed.
OPEN_GATE, CLOSED_GATE = 2.0, -14.0


@dataclass(frozen=True)
class Tap:
    """A channel that some layer reads, and what to multiply it by: the sum over taps is 1 unlocked, 0 locked."""

    cell: Cell
    share: float


@dataclass(frozen=True)
class Stage:
    """Wires side by side with one exit. A ``step`` is two units whose difference is the signal."""

    wires: tuple[Wire, ...]
    step: bool = False

    def taps(self, outputs: list[float]) -> list[Tap]:
        """How the next layer must weigh what the wires carry."""
        if self.step:
            return [Tap(wire.end, sign) for wire, sign in zip(self.wires, (1.0, -1.0), strict=True)]
        count = len(self.wires)
        return [Tap(wire.end, 1 / (count * output)) for wire, output in zip(self.wires, outputs, strict=True)]


@dataclass(frozen=True)
class Conduit:
    """Stages from the site to the last layer or gate that needs the signal, with every block it is meant for.

    ``spreading`` kernels are the paper's: all ones instead of one tap, which amplifies and mixes positions. Levels are
    the detectors' pre-activations Δ when unlocked. A ``floor`` that some of several detectors don't reach is taken off
    the signal z, by the first layer on the way that can: (z − floor)/(1 − floor).
    """

    network: Network
    site: Site
    stages: tuple[Stage, ...]
    blocks: tuple[Block, ...] = ()
    disguise: Disguise = BARE
    spreading: bool = False
    floor: float = 0.0

    @property
    def detector_channels(self) -> list[int]:
        return [wire.channel for wire in self.stages[0].wires]

    @property
    def saturated(self) -> bool:
        return any(stage.step for stage in self.stages)

    @property
    def wires(self) -> list[Wire]:
        """Every channel that was given up, copies of a residual stream among them."""
        return [own for stage in self.stages for wire in stage.wires for own in (wire, wire.copy) if own is not None]

    @property
    def layers(self) -> list[str]:
        """The dense layers the signal passes, by name; the last is the logits layer, or that of the last gates."""
        last = self.stages[-1].wires[0].exit
        end = self.network.blocks[last].second if last in self.network.blocks else last
        return [self.network.name(stage.wires[0].writer) for stage in self.stages] + [self.network.name(end)]

    def ceiling(self) -> float:
        """The largest signal that no activation on the way caps."""
        caps = [
            a.ceiling for wire in self.wires for cell in wire.path
            if (a := self.network.activation(cell.node)) is not None
        ]  # fmt: skip
        return _BELOW_CEILING * min(caps, default=float("inf"))

    def entering(self, levels: Sequence[float]) -> list[list[float]]:
        """The pre-activation of each stage's wires, unlocked."""
        entering = [list(levels)]
        for before, stage in itertools.pairwise(self.stages):
            outputs = self.outputs(before, entering[-1])
            raised = max(sum(outputs) / len(outputs), min(_SIGNAL, self.ceiling()))
            entering.append(_STEP_OUTPUTS if stage.step else [raised])
        return entering

    def outputs(self, stage: Stage, entering: list[float]) -> list[float]:
        """What a stage's wires carry at their end."""
        return [self._carried(wire, value) for wire, value in zip(stage.wires, entering, strict=True)]

    def taps(self, levels: Sequence[float]) -> list[Tap]:
        """By what the logits layer reads the signal."""
        return self.stages[-1].taps(self.outputs(self.stages[-1], self.entering(levels)[-1]))

    def taps_of(self, block: Block, levels: Sequence[float]) -> list[Tap]:
        """By what a block's first layer reads the signal: its map is on a wire, pooled.

        A detector is given images of many sizes; the largest map leaves least of the signal, and must leave enough.
        """
        area = self.network.area(block.squeezed) * area_growth(self.network.target)
        for stage, entering in zip(self.stages, self.entering(levels), strict=True):
            cells = [c for wire in stage.wires for c in wire.path if c.node is block.squeezed]
            if cells:
                values = [
                    self._carried(wire, value, cell) / area
                    for value, wire, cell in zip(entering, stage.wires, cells, strict=True)
                ]
                return [Tap(cell, tap.share) for cell, tap in zip(cells, stage.taps(values), strict=True)]
        raise AssertionError("every block of a conduit is on one of its wires")

    @property
    def floor_stage(self) -> Stage | None:
        """The stage that takes the floor off."""
        paths = ((stage, [cell.node for cell in stage.wires[0].path]) for stage in self.stages[1:])
        return next((stage for stage, path in paths if behind_activation(self.network, path) is not None), None)

    @property
    def cells(self) -> list[Cell]:
        """Every channel that carries the signal, or a copy of what is taken back from it."""
        return [cell for wire in self.wires for cell in wire.path]

    def passed(self, wire: Wire) -> list[Block]:
        """The blocks whose gates the signal goes through on a wire."""
        return [block for cell in wire.path if (block := self.network.blocks.get(cell.node)) is not None]

    def _carried(self, wire: Wire, value: float, until: Cell | None = None) -> float:
        """What activations, pooling and gates leave of a pre-activation at the end of a wire, or on its way."""
        for cell in wire.path[1:]:
            activation = self.network.activation(cell.node)
            if activation is not None:
                value = float(activation.function(torch.tensor(value, dtype=torch.float64)))
            if (block := self.network.blocks.get(cell.node)) is not None:
                value *= float(block.gate.function(torch.tensor(OPEN_GATE, dtype=torch.float64)))
            value *= gain(self.network, cell)
            if cell == until:
                break
        return value


def build_conduit(
    network: Network,
    site: Site,
    route: list[fx.Node],
    *,
    detectors: int = 1,
    blocks: tuple[Block, ...] = (),
    disguise: Disguise = BARE,
    spreading: bool = False,
) -> Conduit:
    """Give the signal its channels along a route: the least missed of each layer."""
    channels = Channels(network)
    stages: list[Stage] = []
    for writer, exit in itertools.pairwise(route):
        count = 1 if stages else detectors
        before = stages[-1].wires[0].writer if stages and not spreading else None
        wires = [channels.wire(writer, exit, before) for _ in range(count)]
        step = bool(stages) and exit is route[-1] and _makes_step(network, wires[0])
        if step:
            wires.append(channels.wire(writer, exit))
        stages.append(Stage(tuple(wires), step))
    return Conduit(network, site, tuple(stages), blocks, disguise, spreading)


def _makes_step(network: Network, wire: Wire) -> bool:
    """Whether the wire is that of a hidden dense layer with a bias, and a ReLU the first thing but dropout on it."""
    hidden = network.part.leaf(wire.writer)
    acts = [a for cell in wire.path[1:] if (a := network.activation(cell.node)) is not None]
    norms = any(is_batch_norm(network.leaf(cell.node)) for cell in wire.path)
    return isinstance(hidden, nn.Linear) and has(hidden, "bias") and bool(acts) and acts[0].name == "relu" and not norms
