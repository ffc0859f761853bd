"""The route of a lock's signal: which operations let it pass, which layers and channels it takes, and what that costs.

The signal is at position (0, 0), which stays in place under any stride. Its channel is followed forward from the layer
that writes it to the dense layers that read it, and backward to everything that is added to it. It is not enough that
the channel can be followed: operations must also map 0 to 0 and keep position (0, 0) in place.

Every layer on the route gives up a channel. Which is cheapest is estimated without data: after a batch norm a channel
has mean β and deviation |g|·σ, and the table of operations propagates these through activations, additions and
concatenations, assuming Gaussian channels and independent summands. Gates of newly inserted blocks are constants.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from stainlock.errors import SiteError
from stainlock.network.graph import Reason, Stop, stop_at
from stainlock.network.network import Block, Network
from stainlock.network.norms import affine_of, expecting_less, is_batch_norm, lacks_statistics
from stainlock.network.ops import KEEPING, Kind, Moments, never_negative, op_of, padding_of, pooled_share
from stainlock.numerics import exact, has
from stainlock.plan import Write, write, write_values
from stainlock.target import evaluation_mode, probe_inputs

# --- where a signal goes ----------------------------------------------------------------------------------------------


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


# --- routes, and the channels on them ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """One channel given to the signal, from the layer that writes it to the next layer on the route.

    ``path`` leads to the cell that ``exit`` reads. ``others`` read the channel too and must not see the signal.
    ``silenced`` are the cells to write zeros into, since they are added to the channel. ``stream`` is added to it too,
    but is subtracted again by means of a ``copy`` that the previous layer makes. ``lost`` are all readings of the
    channel's former content.
    """

    path: tuple[Cell, ...]
    exit: fx.Node
    others: tuple[Reading, ...]
    silenced: tuple[Cell, ...]
    lost: frozenset[Reading] = frozenset()
    stream: Cell | None = None
    copy: Wire | None = None

    @property
    def writer(self) -> fx.Node:
        return self.path[0].node

    @property
    def channel(self) -> int:
        return self.path[0].channel

    @property
    def end(self) -> Cell:
        return self.path[-1]


def find_route(network: Network, site: str, goal: fx.Node) -> list[fx.Node]:
    """The fewest dense layers from the site to the goal, both included; `SiteError` if there is no such route.

    The goal is the logits layer, or the product of a squeeze-and-excite block.
    """
    stops: list[Stop] = []
    for route, reached in _routes(network, site, goal, stops):
        if any(reading.reader is goal for reading in reached.readings):
            return [*route, goal]
    what = "the logits" if network.ends_at(goal) else f"the gates {goal.name}"
    raise _no_way(site, what, stops)


def routes_from(network: Network, site: str) -> Iterator[tuple[list[fx.Node], Spread]]:
    """Routes to all dense layers that a signal from the site can reach, shortest first, and what each layer feeds."""
    yield from _routes(network, site, None, [])


def _routes(
    network: Network, site: str, end: fx.Node | None, stops: list[Stop]
) -> Iterator[tuple[list[fx.Node], Spread]]:
    start = network.nodes[site]
    came_from: dict[fx.Node, fx.Node | None] = {start: None}
    pending = deque([start])
    while pending:
        node = pending.popleft()
        reached = spread(network, Cell(node, 0), end)
        if reached.stops:  # part of the signal would leave the route
            stops += reached.stops
            continue
        route: list[fx.Node] = []
        at: fx.Node | None = node
        while at is not None:
            route.append(at)
            at = came_from[at]
        yield route[::-1], reached
        for reading in reached.readings:
            if reading.reader not in came_from and reading.reader is not end:
                came_from[reading.reader] = node
                pending.append(reading.reader)


def behind_activation(network: Network, path: Sequence[fx.Node]) -> int | None:
    """The index of the first ReLU on a channel's path, if only batch norms and additions come before it; else None.

    Only from there on can something be subtracted from the signal."""
    for place, node in enumerate(path[1:], 1):
        activation = network.activation(node)
        if activation is not None:
            return place if activation.cuts_off else None
        if not is_batch_norm(network.leaf(node)) and network.kind(node) is not Kind.SUM:
            return None
    return None


def _no_way(site: str, goal: str, stops: list[Stop]) -> SiteError:
    where = stops[-1] if stops else Stop("the site", "", Reason.UNREAD)
    return SiteError(
        f"the signal from {site} does not reach {goal}: it stops at {where.node} ({where.op}): {where.reason.value}"
    )


class Channels:
    """Chooses the cheapest channel of each layer for the signal, without data."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._shares = column_shares(network)
        self._taken: set[Cell] = set()

    def wire(self, writer: fx.Node, exit: fx.Node, before: fx.Node | None = None) -> Wire:
        """The cheapest wire from one layer to the next; its cells are then marked as taken.

        The layer ``before``, if given, may copy a residual stream, which is then subtracted from the signal.
        """
        network = self.network
        copied = None if before is None else copied_stream(network, before, writer)
        best: tuple[float, Wire, set[Cell]] | None = None
        for channel in range(network.shapes[writer][1]):
            start = Cell(writer, channel)
            reached = spread(network, start, exit)
            wire = _wire(network, reached, exit, copied)
            # All readers of the channel lose it, even where a closed gate stops the signal.
            lost = [spread(network, cell) for cell in (start, *wire.silenced)]
            cells = set(reached.came_from).union(*(s.came_from for s in lost[1:]))
            if cells & self._taken:
                continue
            readings = {reading for s in lost for reading in s.readings}
            cost = sum(float(self._shares[r.reader][r.cell.columns].sum()) for r in readings)
            if best is None or cost < best[0]:
                best = cost, replace(wire, lost=frozenset(readings)), cells
        if best is None:
            raise SiteError(f"no channel of {network.name(writer)} is left to carry the signal")
        self._taken |= best[2]
        wire = best[1]
        if wire.stream is not None and before is not None:
            return replace(wire, copy=self.wire(before, writer))
        return wire


def copied_stream(network: Network, before: fx.Node, writer: fx.Node) -> fx.Node | None:
    """The residual stream that two layers add to, if the first can pass it to the second unchanged.

    Both must keep positions, with only a batch norm and a ReLU between them, and the stream must come after a ReLU
    itself, so that the ReLU between them does not change it.
    """
    layers = [network.leaf(n) for n in (before, writer)]
    stream = before.all_input_nodes[0]
    between = _chain(network, before, writer)
    joined = _chain(network, writer, None)
    if between is None or joined is None or not all(isinstance(layer, nn.Conv2d) for layer in layers):
        return None
    sizes = {tuple(network.shapes[n][2:]) for n in (stream, before, writer)}
    added = next((n for n in joined if network.kind(n) is Kind.SUM), None)
    behind = joined[joined.index(added) + 1 :] if added else []
    fits = added is not None and stream in added.all_input_nodes and bool(behind) and _is_relu(network, behind[0])
    return stream if fits and len(sizes) == 1 and _is_relu(network, stream) and _only_relu(network, between) else None


def _chain(network: Network, start: fx.Node, end: fx.Node | None) -> list[fx.Node] | None:
    """The nodes after ``start``, as long as each has one reader; None if ``end`` is not reached that way."""
    nodes: list[fx.Node] = []
    node = start
    while len(node.users) == 1:
        (node,) = node.users
        if node is end:
            return nodes
        nodes.append(node)
    return nodes if end is None else None


def _is_relu(network: Network, node: fx.Node) -> bool:
    activation = network.activation(node)
    return activation is not None and activation.is_relu


def _only_relu(network: Network, nodes: list[fx.Node]) -> bool:
    return all(is_batch_norm(network.leaf(n)) or _is_relu(network, n) for n in nodes)


def _wire(network: Network, reached: Spread, exit: fx.Node, copied: fx.Node | None) -> Wire:
    if reached.stops:
        raise reached.stops[0].error()
    own = next(r for r in reached.readings if r.reader is exit)
    path = reached.path(own.cell)
    silenced: list[Cell] = []
    stream = None
    for before, cell in itertools.pairwise(path):
        if network.kind(cell.node) is Kind.SUM:
            for source in cell.node.all_input_nodes:
                if source is copied and source is not before.node:
                    stream = Cell(source, cell.channel)
                elif source is not before.node and source not in network.part.sizes:
                    silenced += silenced_at(network, Cell(source, cell.channel), set(reached.came_from))
    others = tuple(r for r in reached.readings if r != own)
    return Wire(tuple(path), exit, others, tuple(dict.fromkeys(silenced)), stream=stream)


# --- mean and deviation of every channel ------------------------------------------------------------------------------


def remembered(network: Network) -> dict[fx.Node, Moments]:
    """The moments of every node for which they can be derived from batch norms."""
    known: dict[fx.Node, Moments] = {}
    gates = {f"{own.at}.gate.fc2" for own in network.target.insertions}
    blocks = [block for block in network.blocks.values() if network.name(block.second) in gates]
    new = {node: block for block in blocks for node in (block.product, block.output)}
    for node in network.part.graph.nodes:
        if node not in network.shapes:
            continue
        found = _gated(network, new[node], node, known) if node in new else _moments(network, node, known)
        if found is not None:
            known[node] = found
    return known


def _gated(network: Network, block: Block, node: fx.Node, known: dict[fx.Node, Moments]) -> Moments | None:
    """The moments after a newly inserted block, whose gates and shifts are constants while it is unlocked."""
    if block.squeezed not in known:
        return None
    mean, deviation = known[block.squeezed]
    gains = block.gate.function(exact(network.part.leaf(block.second), "bias"))
    shift = exact(network.part.leaf(block.shift), "bias") if block.shift is not None and node is block.output else 0.0
    return gains * mean + shift, gains.abs() * deviation


def _moments(network: Network, node: fx.Node, known: dict[fx.Node, Moments]) -> Moments | None:
    op, sources = op_of(network.part, node), network.part.sources(node)
    if op.kind is Kind.NORM:
        return op.moments([])
    if not sources or any(source not in known for source in sources):
        return None
    return op.moments([known[source] for source in sources])


# --- what a channel costs ---------------------------------------------------------------------------------------------

# Exponent for estimated variances in a residual stream. Of the values tried on ResNet50, this one gives the ranking
# most like that on natural images.
_STREAM = 0.25
# At most this fraction of a reader's output variance is subtracted from its batch norm.
_MOST_LOST = 0.5


def dense_layers(network: Network) -> list[fx.Node]:
    return [
        n for n in network.part.graph.nodes
        if isinstance(layer := network.leaf(n), nn.Conv2d | nn.Linear) and getattr(layer, "groups", 1) == 1
    ]  # fmt: skip


def column_shares(network: Network) -> dict[fx.Node, Tensor]:
    """For every dense layer, each input channel's share of the energy of its outputs: the cost of removing it."""
    known, dense = remembered(network), dense_layers(network)
    unknown = [n for n in dense if n.all_input_nodes[0] not in known]
    measured = _measured_energy(network, unknown) if unknown else {}
    shares = {}
    for node in dense:
        weight = exact(network.part.leaf(node), "weight")
        if (norm := network.norm_behind(node)) is not None:
            g = affine_of(network.part.leaf(norm)).g
            weight = weight * g.view(-1, *(1,) * (weight.dim() - 1))
        columns = weight.square().sum((0, *range(2, weight.dim())))
        if node in measured:
            energy = measured[node]
        else:
            energy = _lost_energy(network, node.all_input_nodes[0], known)
        shares[node] = energy * columns / (energy * columns).sum().clamp(min=1e-30)
    return shares


def _lost_energy(network: Network, node: fx.Node, known: dict[fx.Node, Moments]) -> Tensor:
    """What a layer loses with each channel of a map: its variance, since the mean can be folded into a bias.

    In a residual stream, whose blocks are far from independent, the estimate is poor, so differences are damped.
    """
    variance = known[node][1].square().clamp(min=1e-30)
    while not is_batch_norm(network.leaf(node)):
        sources = [n for n in node.all_input_nodes if n in known]
        if len(sources) != 1:
            return variance**_STREAM
        (node,) = sources
    return variance


def _measured_energy(network: Network, layers: list[fx.Node]) -> dict[fx.Node, Tensor]:
    """Mean square of each input channel of these layers, on synthetic inputs."""
    target, energy = network.target, {}

    def record(node: fx.Node) -> Any:
        def hook(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            channels = -1 if isinstance(layer, nn.Linear) else 1
            energy[node] = given[0].double().square().movedim(channels, 0).flatten(1).mean(1).cpu()

        return hook

    with ExitStack() as hooks, evaluation_mode(target.model), torch.no_grad():
        for node in layers:
            hooks.enter_context(network.part.leaf(node).register_forward_pre_hook(record(node)))
        target.run_traced(probe_inputs(target, "channel cost"))
    return energy


def fold_moments(
    network: Network, readings: Iterable[Reading], rewritten: Iterable[tuple[fx.Node, int]], part: str
) -> list[Write]:
    """Writes that subtract removed channels' means and variances from the batch norms after their readers.

    Later layers then see the same mean and variance. For readers without a batch norm the mean goes into their bias.
    After a ReLU only the mean is subtracted, since variance estimates are poor there; in the signed streams of linear
    bottlenecks they are good. Only statistics from batch norms are folded: those of synthetic inputs did more harm than
    good. Rows that are ``rewritten`` need no correction.
    """
    known, model = remembered(network), network.target.model
    lost: dict[fx.Node, Moments] = {}
    for reader, cell in sorted(
        {(r.reader, r.cell) for r in readings}, key=lambda pair: (pair[0].name, pair[1].channel)
    ):
        if cell.node in known:
            mean, deviation = (moment[cell.columns] for moment in known[cell.node])
            gains, energies = _taps(exact(network.part.leaf(reader), "weight")[:, cell.columns])
            if _behind_relu(network, cell.node):
                energies = torch.zeros_like(energies)
            before = lost.get(reader, (torch.zeros(len(gains), dtype=torch.float64),) * 2)
            lost[reader] = before[0] + gains @ mean, before[1] + energies @ deviation.square()
    for reader, row in rewritten:
        for missing in lost.get(reader, ()):
            missing[row] = 0.0
    writes = []
    for reader, (mean, variance) in lost.items():
        if (behind := network.norm_behind(reader)) is not None:
            values = expecting_less(network.part.leaf(behind), mean, variance, most=_MOST_LOST)
            writes += write_values(model, network.name(behind), (None,), values, part)
        elif has(network.part.leaf(reader), "bias") and not network.ends_at(reader):
            bias = exact(network.part.leaf(reader), "bias") + mean
            writes.append(write(model, f"{network.name(reader)}.bias", (None,), bias, part))
    return writes


def _behind_relu(network: Network, node: fx.Node) -> bool:
    """True if a map has no negative values, for a squeeze-and-excite block before its gates are applied."""
    gated = next((block.squeezed for block in network.blocks.values() if node in (block.product, block.output)), node)
    return never_negative(network.part, gated)


def _taps(columns: Tensor) -> tuple[Tensor, Tensor]:
    """The factors by which each output sees a channel's mean and variance; neighbouring positions are taken to have
    correlation ½."""
    if columns.dim() == 2:
        return columns, columns.square()
    taps = columns.flatten(2)
    whole = taps.sum(2)
    return whole, (whole.square() + taps.square().sum(2)) / 2
