"""The signal's route: the dense layers from the site to its goal, and the channel it takes in each."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from stainlock.channel_cost import column_shares
from stainlock.errors import SiteError
from stainlock.network.channels import Reason, Stop
from stainlock.network.network import Network
from stainlock.network.norms import is_batch_norm
from stainlock.network.ops import Kind
from stainlock.network.signals import Cell, Reading, Spread, silenced_at, spread


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
            return place if activation.name in ("relu", "relu6") else None
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
    return activation is not None and activation.name == "relu"


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
