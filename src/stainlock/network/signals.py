"""Signals: how a lock's signal travels at position (0, 0), which stays in place under any stride.

Its channel is followed forward from the layer that writes it to the dense layers that read it, and backward to
everything that is added to it. It is not enough that the channel can be followed: operations must also map 0 to 0 and
keep position (0, 0) in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from stainlock.network.channels import Reason, Stop, stop_at
from stainlock.network.network import Network
from stainlock.network.norms import is_batch_norm, lacks_statistics
from stainlock.network.ops import KEEPING, Kind, op_of, padding_of, pooled_share
from stainlock.tensors import has


@dataclass(frozen=True)
class Cell:
    """A channel of one node's output; after flattening it is ``repeat`` values wide, position (0, 0) first."""

    node: fx.Node
    channel: int
    repeat: int = 1

    @property
    def columns(self) -> list[int]:
        return list(range(self.channel, self.channel + self.repeat))


@dataclass(frozen=True)
class Reading:
    """A dense layer that reads a cell."""

    reader: fx.Node
    cell: Cell


@dataclass
class Spread:
    """Everything that a channel reaches, up to the next dense layers."""

    start: Cell
    came_from: dict[Cell, Cell | None] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)

    def path(self, to: Cell) -> list[Cell]:
        """The cells from the start to a reached one."""
        cells, at = [to], self.came_from[to]
        while at is not None:
            cells.append(at)
            at = self.came_from[at]
        return cells[::-1]


def spread(network: Network, start: Cell, end: fx.Node | None = None) -> Spread:
    """Follow a channel until every path ends at a dense layer, at ``end``, or at a stop."""
    found = Spread(start, {start: None})
    pending = [start]
    while pending:
        cell = pending.pop()
        for user in cell.node.users:
            step = Reading(user, cell) if user is end else ahead(network, cell, user)
            if isinstance(step, Stop):
                found.stops.append(step)
            elif isinstance(step, Reading):
                found.readings.append(step)
            elif step is not None and step not in found.came_from:
                found.came_from[step] = cell
                pending.append(step)
    return found


def ahead(network: Network, cell: Cell, user: fx.Node) -> Cell | Reading | Stop | None:
    """What one user does with a cell: the cell in which the channel continues, a reading, or a stop; None if the user
    needs only sizes."""
    known = network.steps
    if (cell.node, user) not in known:
        known[cell.node, user] = _step(network, Cell(cell.node, 0), user)
    step = known[cell.node, user]  # for channel 0; the other channels behave alike
    if isinstance(step, Reading):
        return Reading(user, cell)
    if isinstance(step, Cell):
        return Cell(user, cell.channel * step.repeat + step.channel, cell.repeat * step.repeat)
    return step  # type: ignore[no-any-return]


def _step(network: Network, cell: Cell, user: fx.Node) -> Cell | Reading | Stop | None:
    op, leaf = op_of(network.part, user), network.leaf(user)
    if op.kind is Kind.SIZE:
        return None
    if reason := _obstacle(network, cell, user):
        return stop_at(network.part, user, reason)
    if op.kind is Kind.DENSE and not isinstance(leaf, nn.ConvTranspose2d):
        return Reading(user, cell)
    span = op.span(cell.node)
    if span is None or (op.kind is Kind.PRODUCT and not _is_gated(network, cell, user)):
        return stop_at(network.part, user, Reason.GATED if op.kind is Kind.PRODUCT else Reason.UNKNOWN)
    return Cell(user, cell.channel * span.repeat + span.offset, cell.repeat * span.repeat)


def _obstacle(network: Network, cell: Cell, user: fx.Node) -> Reason | None:
    """Why a signal can't pass an operation, even if a channel could; None if it can."""
    op, leaf = op_of(network.part, user), network.leaf(user)
    if op.kind is Kind.OUTPUT:
        return Reason.RETURNED
    if leaf is not None and network.calls[str(user.target)] > 1 and next(leaf.parameters(), None) is not None:
        return Reason.SHARED
    if isinstance(leaf, nn.Conv2d) and network.tap(user) is None:
        return Reason.CORNER_UNSEEN
    if isinstance(leaf, nn.Linear) and len(network.shapes[cell.node]) != 2:
        return Reason.OVER_A_MAP
    if op.activation is not None and not op.activation.keeps_zero:
        return Reason.NOT_SILENT
    if is_batch_norm(leaf) and op.kind is not Kind.NORM:
        return Reason.ACTIVATION_UNKNOWN
    if lacks_statistics(leaf):
        return Reason.NO_STATISTICS
    if op.kind is Kind.GROUPED:
        return Reason.GROUPED
    if op.kind is Kind.PAD and any((padding_of(network.part, user) or (0, 1, 1))[1:]):
        return Reason.CORNER_MOVED
    return None


def _is_gated(network: Network, cell: Cell, product: fx.Node) -> bool:
    """Whether the product applies the gates of a squeeze-and-excite block, which a lock can hold open."""
    return product in network.blocks and cell.node is network.blocks[product].squeezed


def gain(network: Network, cell: Cell) -> float:
    """The factor by which a cell's node, if it is average pooling, scales a signal at one position."""
    return pooled_share(network.part, cell.node)


def silenced_at(network: Network, cell: Cell, carried: set[Cell]) -> list[Cell]:
    """Going back from a cell: the outputs of batch norms or layers to set to zero so that this cell is zero."""
    if cell in carried:
        raise stop_at(network.part, cell.node, Reason.ADDED_TO_ITSELF).error()
    node, leaf, op = cell.node, network.leaf(cell.node), op_of(network.part, cell.node)
    writes_it = isinstance(leaf, nn.Conv2d | nn.Linear) or is_batch_norm(leaf)
    if writes_it and network.calls[str(node.target)] == 1 and has(leaf, "weight"):  # type: ignore[arg-type]
        return [cell]
    sources = network.part.sources(node)
    if op.kind is Kind.PRODUCT:  # zero times any gate is zero
        sources = sources[:1] if op.span(sources[0]) is not None else sources[1:]
    passes = op.kind in KEEPING | {Kind.PAD, Kind.JOIN, Kind.SUM, Kind.PRODUCT}
    if not passes and (op.kind is not Kind.ACTIVATION or op.activation is None or not op.activation.keeps_zero):
        raise stop_at(network.part, node, Reason.CANT_BE_SILENCED).error()
    found = []
    for source in sources:
        span = op.span(source)
        if span is None:
            raise stop_at(network.part, node, Reason.CANT_BE_SILENCED).error()
        inside = cell.channel - span.offset
        if 0 <= inside < network.shapes[source][1]:  # otherwise it comes from another source, or from padding
            found += silenced_at(network, Cell(source, inside, cell.repeat), carried)
    return found
