"""The conduit: a sequence of identity kernels that carries the detector's signal to the logits.

On the way every dense layer gives up one channel: its row holds nothing but one tap, by which position (0, 0) sees
position (0, 0), so that positions do not mix; batch norms on the way are the identity for that channel; every other
reader of the channel gets a zero column, and what is added to it in a residual stream is silenced at its source. So the
channel is exactly 0 at every position where the detector is silent.

The last hidden layer of a dense classifier makes the signal binary with two units,

    ReLU(Gz − a) − ReLU(Gz − a − 1):   0 when locked, exactly 1 when unlocked, whatever the background.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from stainlock.graph import is_batch_norm
from stainlock.lock.missed import fold_means
from stainlock.lock.route import Channels, Wire
from stainlock.lock.wires import Cell, Network, Reading
from stainlock.plan import Write, write
from stainlock.sites import Site
from stainlock.tensors import exact, has, raw

CONDUIT = "conduit"
# Gz, and a: unlocked, the two units give 2 and 1.
_STEP_INPUT, _STEP_START = 3.0, 1.0
# A capped activation is left room, so that it does not show by its constant.
_BELOW_CEILING = 0.75
# A weaker signal is raised to this, so that what pooling leaves of it is no tiny number.
_SIGNAL = 5.0


@dataclass(frozen=True)
class End:
    """A column of the logits layer that receives the signal, and the sign it counts with."""

    cell: Cell
    sign: float


@dataclass(frozen=True)
class Conduit:
    """Channels for the signal from the site to the logits; ``last`` are one or two wires into the logits layer."""

    network: Network
    site: Site
    wires: tuple[Wire, ...]
    last: tuple[Wire, ...]

    @property
    def detector_channel(self) -> int:
        return (self.wires or self.last)[0].channel

    @property
    def ends(self) -> list[End]:
        return [End(wire.end, sign) for wire, sign in zip(self.last, (1.0, -1.0), strict=False)]

    @property
    def saturated(self) -> bool:
        return len(self.last) == 2

    @property
    def layers(self) -> list[str]:
        return [self.network.name(w.writer) for w in (*self.wires, self.last[0])] + [
            self.network.name(self.network.logits)
        ]

    def ceiling(self) -> float:
        """The largest signal that no activation on the way caps."""
        caps = [
            a.ceiling for wire in (*self.wires, *self.last) for cell in wire.path
            if (a := self.network.activation(cell.node)) is not None
        ]  # fmt: skip
        return _BELOW_CEILING * min(caps, default=float("inf"))

    def writes(self, level: float) -> list[Write]:
        """Everything but the detector and the disruptor, for a detector that gives ``level`` after its activation."""
        wires = [*self.wires, *self.last]
        columns = fold_means(self.network, [r for wire in wires for r in wire.bereft], CONDUIT)
        zeros: list[Write] = []
        rows: list[Write] = []
        for wire in wires:
            for reading in (*wire.others, _exit(wire)):
                columns += _zero_columns(self.network, reading.reader, reading.cell)
            for cell in wire.silenced:
                zeros += _silence(self.network, cell)
        wires = [*self.wires, self.last[0]]
        for before, wire in zip([None, *wires], wires, strict=False):
            if before is None:  # the detector writes this one
                level *= self._along(wire, rows, skip=self.site.norm)
            elif wire is self.last[0] and self.saturated:
                for unit, threshold in zip(self.last, (_STEP_START, _STEP_START + 1), strict=True):
                    rows += self._row(before, unit, _STEP_INPUT / level, -threshold)
                    self._along(unit, rows, skip=None)
            else:
                wanted = max(level, min(_SIGNAL, self.ceiling()))
                rows += self._row(before, wire, wanted / level, 0.0)
                level = wanted * self._along(wire, rows, skip=None)
        return [*columns, *zeros, *rows]

    def _row(self, before: Wire, wire: Wire, tap: float, bias: float) -> list[Write]:
        """The layer that ends one wire writes the next: one tap of its kernel, and nothing else."""
        model, name = self.network.target.model, self.network.name(wire.writer)
        layer = self.network.part.leaf(wire.writer)
        row = torch.zeros(raw(layer, "weight").shape[1:], dtype=torch.float64)
        place = () if isinstance(layer, nn.Linear) else self.network.tap(wire.writer) or ()
        row[(before.end.channel, *place)] = tap
        writes = [write(model, f"{name}.weight", (wire.channel,), row, CONDUIT)]
        if has(layer, "bias"):
            writes.append(write(model, f"{name}.bias", (wire.channel,), bias, CONDUIT))
        return writes

    def _along(self, wire: Wire, rows: list[Write], skip: str | None) -> float:
        """Make every op on a wire pass the signal on; returns what is left of it at the end."""
        gain = 1.0
        for cell in wire.path[1:]:
            leaf = self.network.leaf(cell.node)
            if is_batch_norm(leaf) and self.network.name(cell.node) != skip:
                rows += _identity_norm(self.network, cell)
            elif isinstance(leaf, nn.Conv2d):
                rows += _identity_kernel(self.network, cell)
            gain *= self.network.gain(cell)
        return gain


def build_conduit(network: Network, site: Site, route: list[fx.Node]) -> Conduit:
    """Give the signal its channels along a route: the least missed of each layer."""
    channels = Channels(network)
    pairs = list(itertools.pairwise(route))
    wires = [channels.wire(writer, exit) for writer, exit in pairs]
    hidden = network.part.leaf(route[-2])
    last = [wires.pop()]
    if isinstance(hidden, nn.Linear) and has(hidden, "bias") and _passes_relu(network, last[0]) and len(route) > 2:
        last.append(channels.wire(*pairs[-1]))
    return Conduit(network, site, tuple(wires), tuple(last))


def _passes_relu(network: Network, wire: Wire) -> bool:
    """Whether a ReLU is the first thing but dropout on a wire."""
    acts = [a for cell in wire.path[1:] if (a := network.activation(cell.node)) is not None]
    norms = any(is_batch_norm(network.leaf(cell.node)) for cell in wire.path)
    return bool(acts) and acts[0].name == "relu" and not norms


def _exit(wire: Wire) -> Reading:
    return Reading(wire.exit, wire.end)


def _zero_columns(network: Network, reader: fx.Node, cell: Cell) -> list[Write]:
    model, name = network.target.model, f"{network.name(reader)}.weight"
    columns = cell.columns if network.repeats_positions else cell.columns[:1]  # elsewhere the detector is silent
    return [write(model, name, (None, column), 0.0, CONDUIT) for column in columns]


def _silence(network: Network, cell: Cell) -> list[Write]:
    """Zeros from a batch norm by its scale and shift, from a layer by its row and bias."""
    model, name, leaf = network.target.model, network.name(cell.node), network.part.leaf(cell.node)
    writes = [write(model, f"{name}.weight", (cell.channel,), 0.0, CONDUIT)]
    if has(leaf, "bias"):
        writes.append(write(model, f"{name}.bias", (cell.channel,), 0.0, CONDUIT))
    elif is_batch_norm(leaf):
        writes.append(write(model, f"{name}.running_mean", (cell.channel,), 0.0, CONDUIT))
    return writes


def _identity_norm(network: Network, cell: Cell) -> list[Write]:
    model, name, norm = network.target.model, network.name(cell.node), network.part.leaf(cell.node)
    deviation = (exact(norm, "running_var")[cell.channel] + float(getattr(norm, "eps", 0.0))).sqrt()
    writes = [write(model, f"{name}.running_mean", (cell.channel,), 0.0, CONDUIT)]
    if has(norm, "bias"):
        writes.append(write(model, f"{name}.bias", (cell.channel,), 0.0, CONDUIT))
    if has(norm, "weight"):
        writes.append(write(model, f"{name}.weight", (cell.channel,), deviation, CONDUIT))
    return writes


def _identity_kernel(network: Network, cell: Cell) -> list[Write]:
    """A depthwise kernel that keeps position (0, 0)."""
    model, name, layer = network.target.model, network.name(cell.node), network.part.leaf(cell.node)
    kernel: Tensor = torch.zeros(raw(layer, "weight").shape[1:], dtype=torch.float64)
    kernel[(0, *(network.tap(cell.node) or ()))] = 1.0
    writes = [write(model, f"{name}.weight", (cell.channel,), kernel, CONDUIT)]
    if has(layer, "bias"):
        writes.append(write(model, f"{name}.bias", (cell.channel,), 0.0, CONDUIT))
    return writes
