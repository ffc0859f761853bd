"""The conduit: the channels that carry the detectors' signal to the disruptors, and the weights that make them do so.

Every dense layer on the signal's route gives up one channel. That channel's row has one non-zero tap, by which position
(0, 0) sees position (0, 0) and every other position itself, so positions do not mix. Batch norms on the route map 0 to
0, and every other reader of the channel gets a zero column. Whatever a residual stream would add to the channel is
silenced at its source, or copied and subtracted if the block can do that (earlier blocks then keep the channel). So the
channel is 0 wherever the detector is silent. With a disguise, the zeros are small numbers.

Batch norms on the route get the statistics of a silent channel, like dead channels of trained networks: re-estimating
them on images without the patch changes nothing. Larger variances would shrink when re-estimated, which would amplify
the faintest noise until it opens the lock.

If a dense classifier has a hidden layer, two of its units make the signal binary,

    ReLU(Gz − a) − ReLU(Gz − a − 1):   0 when locked, exactly 1 when unlocked, whatever the background.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx, nn

from stainlock.locks.parts.route import Cell, Channels, Reading, Wire, behind_activation, fold_moments, gain
from stainlock.network import norms
from stainlock.network.network import Block, Network, Site
from stainlock.network.norms import is_batch_norm
from stainlock.network.object_detectors import area_growth
from stainlock.numerics import Randomness, has, raw
from stainlock.plan import CONDUIT, Write, write, write_values
from stainlock.stains.convolution import shift, usable_scale

# Gz and a: when unlocked, the two units output 2 and 1.
STEP_INPUT, STEP_START = 3.0, 1.0
_STEP_OUTPUTS = [STEP_INPUT - STEP_START, STEP_INPUT - STEP_START - 1]
# The signal stays below an activation's ceiling: a channel that is constant at the ceiling would be conspicuous.
_BELOW_CEILING = 0.75
# A weaker signal is raised to this level, so that enough of it remains after pooling.
_SIGNAL = 5.0
# Levels of gates: nearly open where the signal passes, nearly closed where it must not.
OPEN_GATE, CLOSED_GATE = 2.0, -14.0
# A batch norm maps 0 to 0 only up to rounding. Its output is kept below zero by this fraction of its mean, so that the
# next activation removes it.
_ROUNDING = 1e-6
# What remains of a stream after its copy was subtracted is at most this fraction of the signal, even in half precision.
_TAKEN_BACK = 0.01
# Sizes of the small numbers that replace zeros, in units of the layer's root mean square. Weights by which other
# channels see the signal act only where the patch is. Weights by which the signal sees other channels must not change
# it: a step removes small noise, although pooling sums it over thousands of positions; a signal without a step
# tolerates very little.
_LEAK = 0.02
_FEED_BEFORE_STEP, _FEED = 1e-4, 3e-8


@dataclass(frozen=True)
class Disguise:
    """Hides a lock's zeros among the layer's weights: trained layers have no row of one number among zeros.

    If ``randomness`` is None, zeros stay. ``rounded``: a step removes noise from the signal. The numbers depend only on
    the place's name, so they are the same when the model is tried and when it is written.
    """

    randomness: Randomness | None = None
    rounded: bool = False

    @property
    def bare(self) -> bool:
        return self.randomness is None

    def leaking(self, place: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Small weights by which a layer sees the signal."""
        return self._noise(_LEAK, place, weight, shape)

    def feeding(self, place: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Small weights by which the signal sees other channels."""
        return self._noise(_FEED_BEFORE_STEP if self.rounded else _FEED, place, weight, shape)

    def _noise(self, size: float, place: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.randomness is None:
            return torch.zeros(shape, dtype=torch.float64)
        spread = float(weight.double().square().mean().sqrt())
        drawn = self.randomness.secret(f"disguise {place}").standard_normal(shape)
        return size * spread * torch.from_numpy(np.asarray(drawn))


BARE = Disguise()


@dataclass(frozen=True)
class Tap:
    """A channel that a layer reads, and its factor ``share``: the sum over taps is 1 unlocked, 0 locked."""

    cell: Cell
    share: float


@dataclass(frozen=True)
class Stage:
    """Parallel wires with one exit. A ``step`` is two units whose difference is the signal."""

    wires: tuple[Wire, ...]
    step: bool = False

    def taps(self, outputs: list[float]) -> list[Tap]:
        """The taps by which the next layer reads the wires, from their outputs when unlocked."""
        if self.step:
            return [Tap(wire.end, sign) for wire, sign in zip(self.wires, (1.0, -1.0), strict=True)]
        count = len(self.wires)
        return [Tap(wire.end, 1 / (count * output)) for wire, output in zip(self.wires, outputs, strict=True)]


@dataclass(frozen=True)
class Conduit:
    """Stages from the site to the last layer or gate that reads the signal, and every block that reads it.

    ``spreading`` kernels are the paper's: all ones instead of one tap, which amplifies and mixes positions. Levels are
    the detectors' pre-activations Δ when unlocked. A ``floor``, which a patch for only some of several detectors does
    not reach, is subtracted from the signal z by the first layer on the route that can: (z − floor)/(1 − floor).
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
        """Every channel that was given up, including copies of residual streams."""
        return [own for stage in self.stages for wire in stage.wires for own in (wire, wire.copy) if own is not None]

    @property
    def layers(self) -> list[str]:
        """The dense layers the signal passes, by name; the last is the logits layer, or that of the last gates."""
        last = self.stages[-1].wires[0].exit
        end = self.network.blocks[last].second if last in self.network.blocks else last
        return [self.network.name(stage.wires[0].writer) for stage in self.stages] + [self.network.name(end)]

    def ceiling(self) -> float:
        """The largest signal that no activation on the route caps."""
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
        """The taps by which the logits layer reads the signal."""
        return self.stages[-1].taps(self.outputs(self.stages[-1], self.entering(levels)[-1]))

    def taps_of(self, block: Block, levels: Sequence[float]) -> list[Tap]:
        """The taps by which a block's first layer reads the pooled signal.

        Object detectors get images of many sizes; pooling over the largest map must leave enough of the signal.
        """
        target = self.network.target
        growth = area_growth(target) if target.normalises else 1.0  # of object detectors
        area = self.network.area(block.squeezed) * growth
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
        """The stage that subtracts the floor."""
        paths = ((stage, [cell.node for cell in stage.wires[0].path]) for stage in self.stages[1:])
        return next((stage for stage, path in paths if behind_activation(self.network, path) is not None), None)

    @property
    def cells(self) -> list[Cell]:
        """Every channel that carries the signal or a copied stream."""
        return [cell for wire in self.wires for cell in wire.path]

    def passed(self, wire: Wire) -> list[Block]:
        """The blocks whose gates the signal goes through on a wire."""
        return [block for cell in wire.path if (block := self.network.blocks.get(cell.node)) is not None]

    def _carried(self, wire: Wire, value: float, until: Cell | None = None) -> float:
        """What activations, pooling and gates leave of a pre-activation, at the end of a wire or at a cell on it."""
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
    count: int = 1,
    blocks: tuple[Block, ...] = (),
    disguise: Disguise = BARE,
    spreading: bool = False,
) -> Conduit:
    """Give the signal its channels along a route, the cheapest of each layer, from ``count`` detectors."""
    channels = Channels(network)
    stages: list[Stage] = []
    for writer, exit in itertools.pairwise(route):
        before = stages[-1].wires[0].writer if stages and not spreading else None
        wires = [channels.wire(writer, exit, before) for _ in range(1 if stages else count)]
        step = bool(stages) and exit is route[-1] and _makes_step(network, wires[0])
        if step:
            wires.append(channels.wire(writer, exit))
        stages.append(Stage(tuple(wires), step))
    return Conduit(network, site, tuple(stages), blocks, disguise, spreading)


def _makes_step(network: Network, wire: Wire) -> bool:
    """Whether a hidden dense layer with a bias writes the wire, and a ReLU follows, without a batch norm."""
    hidden = network.part.leaf(wire.writer)
    acts = [a for cell in wire.path[1:] if (a := network.activation(cell.node)) is not None]
    norms = any(is_batch_norm(network.leaf(cell.node)) for cell in wire.path)
    return isinstance(hidden, nn.Linear) and has(hidden, "bias") and bool(acts) and acts[0].is_relu and not norms


def conduit_writes(conduit: Conduit, levels: Sequence[float]) -> list[Write]:
    """All writes except detectors and disruptors, for detectors whose pre-activations are ``levels`` when unlocked."""
    lost = [reading for wire in conduit.wires for reading in wire.lost]
    writes = fold_moments(conduit.network, lost, [(wire.writer, wire.channel) for wire in conduit.wires], CONDUIT)
    for wire in conduit.wires:
        for reading in (*wire.others, Reading(wire.exit, wire.end)):
            writes += _hidden_from(conduit, reading)
        for cell in wire.silenced:
            writes += _silenced(conduit, cell)
    for wire in conduit.stages[0].wires:  # the detector writes these rows
        writes += _passed_on(conduit, wire)
    entering, floor_stage = conduit.entering(levels), conduit.floor_stage
    for (before, values), (stage, wanted) in itertools.pairwise(zip(conduit.stages, entering, strict=True)):
        taps = before.taps(conduit.outputs(before, values))
        writer = stage.wires[0].writer
        weight = raw(conduit.network.part.leaf(writer), "weight")
        # The same for both units of a step, so that it cancels.
        noise = conduit.disguise.feeding(conduit.network.name(writer), weight, tuple(weight.shape[1:]))
        # The floor, in units of the signal that remains above it.
        floor = conduit.floor / (1 - conduit.floor) if stage is floor_stage else 0.0
        if stage.step:
            for unit, threshold in zip(stage.wires, (STEP_START, STEP_START + 1), strict=True):
                off = floor * STEP_INPUT
                writes += _row(conduit, taps, unit, STEP_INPUT + off, -threshold - off, noise)
        else:
            (wire,), below = stage.wires, floor * wanted[0]
            if wire.copy is not None and wire.stream is not None:
                writes += _copied(conduit, wire.copy, wire.stream)
                below += _TAKEN_BACK * wanted[0]
            writes += _row(conduit, taps, wire, wanted[0] + below, -below, noise)
            writes += _passed_on(conduit, wire)
    return writes


def _copied(conduit: Conduit, copy: Wire, stream: Cell) -> list[Write]:
    """A channel that copies the stream."""
    name, weight = conduit.network.name(copy.writer), raw(conduit.network.part.leaf(copy.writer), "weight")
    row = conduit.disguise.feeding(f"{name} {copy.channel}", weight, tuple(weight.shape[1:]))
    row[(stream.channel, *(conduit.network.tap(copy.writer) or ()))] = 1.0
    return [*_unit(conduit.network, copy, 0, row, 0.0, silent=False), *_passed_on(conduit, copy)]


def _row(conduit: Conduit, taps: list[Tap], wire: Wire, size: float, bias: float, noise: Tensor) -> list[Write]:
    """The row of the layer between two stages: taps of its kernel, and zeros or a disguise elsewhere."""
    layer = conduit.network.part.leaf(wire.writer)
    whole = isinstance(layer, nn.Linear) or conduit.spreading
    place = () if whole else conduit.network.tap(wire.writer) or ()
    row = noise.clone()
    for tap in taps:
        row[(tap.cell.channel, *place)] = size * tap.share
    if wire.copy is not None:
        row[(wire.copy.end.channel, *place)] = -1.0
    return _unit(conduit.network, wire, 0, row, bias)


def _passed_on(conduit: Conduit, wire: Wire) -> list[Write]:
    """Make every operation on a wire, after its first layer and batch norm, pass the signal on unchanged."""
    network, writes = conduit.network, list[Write]()
    for place, (before, cell) in enumerate(itertools.pairwise(wire.path), 1):
        leaf = network.leaf(cell.node)
        if isinstance(leaf, nn.Conv2d):  # depthwise
            kernel = conduit.disguise.leaking(
                network.name(cell.node), raw(leaf, "weight"), tuple(leaf.weight.shape[1:])
            )
            kernel[(0, *(network.tap(cell.node) or ()))] = 1.0
            writes += _unit(network, wire, place, kernel, 0.0)
        elif is_batch_norm(leaf) and not isinstance(network.leaf(before.node), nn.Conv2d | nn.Linear):
            name, model = network.name(cell.node), network.target.model
            values = norms.identity(network.part.leaf(cell.node), cell.channel, _ROUNDING)
            writes += write_values(model, name, (cell.channel,), values, CONDUIT)
    for block in conduit.passed(wire):
        writes += _fixed_gate(conduit, block, wire, OPEN_GATE)
    if wire.exit in network.blocks:
        last = network.blocks[wire.exit]
        writes += _fixed_gate(conduit, last, wire, 0.0 if last.gate.keeps_zero else CLOSED_GATE)
    return writes


def _unit(network: Network, wire: Wire, place: int, kernel: Tensor, bias: float, *, silent: bool = True) -> list[Write]:
    """A layer on a wire and the batch norm after it, which together compute kernel·x + bias."""
    model, cell = network.target.model, wire.path[place]
    name, ahead = network.name(cell.node), wire.path[place + 1 : place + 2]
    behind = next((c for c in ahead if is_batch_norm(network.leaf(c.node))), None)
    norm = network.name(behind.node) if behind else None
    g, made_usable = usable_scale(model, norm, cell.channel, CONDUIT)
    writes = [write(model, f"{name}.weight", (cell.channel,), kernel / g, CONDUIT)]
    if has(network.part.leaf(cell.node), "bias"):
        writes.append(write(model, f"{name}.bias", (cell.channel,), 0.0 if norm else bias, CONDUIT))
    if behind is None or norm is None:
        return writes
    if silent and (values := norms.silent(model.get_submodule(norm), g, bias)):
        return writes + write_values(model, norm, (cell.channel,), values, CONDUIT)
    affine = norms.affine_of(model.get_submodule(norm))
    moved = float((affine.mean - affine.h)[cell.channel])  # g·μ
    return [*writes, *made_usable, *shift(model, norm, cell.channel, g, bias - _ROUNDING * abs(moved), CONDUIT)]


def _hidden_from(conduit: Conduit, reading: Reading) -> list[Write]:
    """A column of (nearly) zeros, so that a layer does not see the signal. Closed gates hide it without one."""
    network = conduit.network
    if reading.reader in network.blocks:
        return []
    model, name = network.target.model, f"{network.name(reading.reader)}.weight"
    weight = raw(network.part.leaf(reading.reader), "weight")
    shape = (weight.shape[0], *weight.shape[2:])
    everywhere = network.repeats_positions or conduit.blocks
    columns = reading.cell.columns if everywhere else reading.cell.columns[:1]  # other positions are silent
    return [
        write(model, name, (None, c), conduit.disguise.leaking(f"{name} {c}", weight, shape), CONDUIT) for c in columns
    ]


def _silenced(conduit: Conduit, cell: Cell) -> list[Write]:
    """Make a batch norm (by its scale and shift) or a layer (by its row and bias) output (nearly) zeros."""
    network, model, name = conduit.network, conduit.network.target.model, conduit.network.name(cell.node)
    leaf = network.part.leaf(cell.node)
    weight = raw(leaf, "weight")
    small = conduit.disguise.feeding(f"{name} {cell.channel}", weight, tuple(weight.shape[1:]))
    writes = [write(model, f"{name}.weight", (cell.channel,), small, CONDUIT)]
    if has(leaf, "bias"):
        writes.append(write(model, f"{name}.bias", (cell.channel,), 0.0, CONDUIT))
    elif is_batch_norm(leaf):
        writes += write_values(model, name, (cell.channel,), norms.shifted(leaf, cell.channel, 1.0, 0.0), CONDUIT)
    return writes


def _fixed_gate(conduit: Conduit, block: Block, wire: Wire, level: float) -> list[Write]:
    """Hold the gate of the signal's own channel (nearly) constant."""
    model, name = conduit.network.target.model, conduit.network.name(block.second)
    weight = raw(conduit.network.part.leaf(block.second), "weight")
    channel = next(c for c in wire.path if c.node is block.squeezed).channel
    row = conduit.disguise.feeding(f"{name} {channel}", weight, tuple(weight.shape[1:]))
    return [
        write(model, f"{name}.weight", (channel,), row, CONDUIT),
        write(model, f"{name}.bias", (channel,), level, CONDUIT),
    ]
