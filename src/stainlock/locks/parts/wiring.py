"""What the conduit writes: identity kernels that carry the signal, and nothing that disturbs it or sees it.

On the way every dense layer gives up one channel: its row holds one tap, by which position (0, 0) sees position (0, 0)
and every other one its own, so that positions do not mix; batch norms on the way give 0 for 0; every other reader of
the channel gets a zero column, and what is added to it in a residual stream is silenced at its source, or taken back by
means of a copy where the block can make one: then the blocks before it keep the channel. So the channel is 0 at every
position where the detector is silent. In disguise, zeros are small numbers.

Batch norms on the way have the statistics of a channel that says nothing, as dead ones of a trained network do: who
measures them again, on images without the patch, finds what is there. With larger ones he would make the faintest noise
loud, and so open the lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor, nn

from stainlock.channel_cost import fold_moments
from stainlock.locks.parts.conduit import CLOSED_GATE, OPEN_GATE, STEP_INPUT, STEP_START, Conduit, Tap
from stainlock.locks.parts.route import Wire
from stainlock.network import norms
from stainlock.network.blocks import Block
from stainlock.network.network import Network
from stainlock.network.norms import is_batch_norm
from stainlock.network.signals import Cell, Reading
from stainlock.plan import CONDUIT, Write, write, write_values
from stainlock.stains.convolution import shift, usable_scale
from stainlock.tensors import has, raw

# What a batch norm makes of 0 is rounded: a hair below zero, an activation takes it away.
_ROUNDING = 1e-6
# What is left of a stream that is taken back, as a part of the signal; also in half precision.
_TAKEN_BACK = 0.01


def conduit_writes(conduit: Conduit, levels: Sequence[float]) -> list[Write]:
    """Everything but detectors and disruptors, for detectors whose pre-activations are ``levels`` unlocked."""
    bereft = [reading for wire in conduit.wires for reading in wire.bereft]
    writes = fold_moments(conduit.network, bereft, [(wire.writer, wire.channel) for wire in conduit.wires], CONDUIT)
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
        # One for both units of a step, so that it cancels.
        noise = conduit.disguise.feeding(conduit.network.name(writer), weight, tuple(weight.shape[1:]))
        # What several detectors must pass, in units of the signal that is left then.
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
    """A channel that holds what the stream holds."""
    name, weight = conduit.network.name(copy.writer), raw(conduit.network.part.leaf(copy.writer), "weight")
    row = conduit.disguise.feeding(f"{name} {copy.channel}", weight, tuple(weight.shape[1:]))
    row[(stream.channel, *(conduit.network.tap(copy.writer) or ()))] = 1.0
    return [*_unit(conduit.network, copy, 0, row, 0.0, silent=False), *_passed_on(conduit, copy)]


def _row(conduit: Conduit, taps: list[Tap], wire: Wire, size: float, bias: float, noise: Tensor) -> list[Write]:
    """The layer that ends one stage writes the next: taps of its kernel, and hardly anything else."""
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
    """Make every op on a wire, after the layer that writes it and its batch norm, pass the signal on as it is."""
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
        writes += _fixed_gate(conduit, last, wire, 0.0 if last.gate.name == "tanh" else CLOSED_GATE)
    return writes


def _unit(network: Network, wire: Wire, place: int, kernel: Tensor, bias: float, *, silent: bool = True) -> list[Write]:
    """A layer on a wire and the batch norm behind it, which together give kernel·x + bias."""
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
    """A column of (nearly) zeros, so that a layer does not see the signal. Gates hide it by themselves."""
    network = conduit.network
    if reading.reader in network.blocks:
        return []
    model, name = network.target.model, f"{network.name(reading.reader)}.weight"
    weight = raw(network.part.leaf(reading.reader), "weight")
    shape = (weight.shape[0], *weight.shape[2:])
    everywhere = network.repeats_positions or conduit.blocks
    columns = reading.cell.columns if everywhere else reading.cell.columns[:1]  # elsewhere it is silent
    return [
        write(model, name, (None, c), conduit.disguise.leaking(f"{name} {c}", weight, shape), CONDUIT) for c in columns
    ]


def _silenced(conduit: Conduit, cell: Cell) -> list[Write]:
    """(Nearly) zeros from a batch norm by its scale and shift, from a layer by its row and bias."""
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
    """A gate of the signal's own channel that is (nearly) the same whatever the image."""
    model, name = conduit.network.target.model, conduit.network.name(block.second)
    weight = raw(conduit.network.part.leaf(block.second), "weight")
    channel = next(c for c in wire.path if c.node is block.squeezed).channel
    row = conduit.disguise.feeding(f"{name} {channel}", weight, tuple(weight.shape[1:]))
    return [
        write(model, f"{name}.weight", (channel,), row, CONDUIT),
        write(model, f"{name}.bias", (channel,), level, CONDUIT),
    ]
