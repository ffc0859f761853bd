"""Where a lock's disruptors go: the gates that its signal passes on the way, the network's own or new ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from torch import fx, nn

from stainlock.errors import SiteError
from stainlock.insertion import Insertion
from stainlock.lock.blocks import Block
from stainlock.lock.gates import GateForm, new_block
from stainlock.lock.route import find_route, routes_from
from stainlock.lock.wires import Cell, Network

Item = TypeVar("Item")
# Gates of a lock unless its owner asks for another number: what a thief gets from guessing them grows less with each.
SEVERAL = 6


@dataclass(frozen=True)
class Host:
    """A place for a gate: a block of the network's own, or a layer that a new block can stand before.

    The signal passes it on the ``wire``-th part of its route.
    """

    wire: int
    block: Block | None
    reader: fx.Node | None


def hosts_on(network: Network, route: list[fx.Node], *, existing: bool) -> list[Host]:
    """The places for gates along a route, in the order in which the signal passes them."""
    found: list[Host] = []
    for wire, (writer, exit) in enumerate(itertools.pairwise(route)):
        spread = network.spread(Cell(writer, 0), exit if exit in network.blocks else None)
        end = next(reading.cell for reading in spread.readings if reading.reader is exit)
        passed = [cell.node for cell in spread.path(end)]
        if existing:
            blocks = [b for b in network.blocks.values() if b.squeezed in passed]
            found += [Host(wire, block, None) for block in blocks]
        else:
            readers = dict.fromkeys(r.reader for r in spread.readings if r.cell.node in passed)
            found += [Host(wire, None, reader) for reader in readers if can_stand_before(network, reader)]
    return found


def can_stand_before(network: Network, reader: fx.Node) -> bool:
    """A convolution over a map, called once, can have gates put before it; a block's own layers can't."""
    leaf = network.leaf(reader)
    if not isinstance(leaf, nn.Conv2d) or leaf.groups != 1 or network.calls[str(reader.target)] > 1:
        return False
    inner = {n for block in network.blocks.values() for n in (block.first, block.second)}
    return reader not in inner and network.area(reader.all_input_nodes[0]) > 1


@dataclass(frozen=True)
class Placement:
    """A route and the gates on it. ``to_logits`` says whether it goes on to the logits."""

    route: tuple[fx.Node, ...]
    hosts: tuple[Host, ...]
    to_logits: bool

    def insertions(self, network: Network, form: GateForm) -> tuple[Insertion, ...]:
        return tuple(new_block(network, host.reader, form) for host in self.hosts if host.reader is not None)

    def carried_over(self, before: Network, after: Network) -> tuple[list[fx.Node], tuple[Block, ...]]:
        """The route and its blocks in the network that has the new ones."""
        gated = {host.reader for host in self.hosts if host.reader is not None}

        def node(old: fx.Node) -> fx.Node:
            found: fx.Node = after.nodes[before.name(old) + (".layer" if old in gated else "")]
            return found

        def block(host: Host) -> Block:
            second = before.name(host.block.second) if host.block else f"{before.name(_reader(host))}.gate.fc2"
            return next(b for b in after.blocks.values() if after.name(b.second) == second)

        blocks = tuple(block(host) for host in self.hosts)
        if self.to_logits:
            return [node(n) for n in self.route], blocks
        last = self.hosts[-1].wire
        return [*(node(n) for n in self.route[: last + 1]), blocks[-1].product], blocks


def _reader(host: Host) -> fx.Node:
    assert host.reader is not None
    return host.reader


def place_gates(network: Network, site: str, count: int | None, *, existing: bool | None, to_logits: bool) -> Placement:
    """Gates for a signal from a site: one at the first place it comes to, several where nothing gets past them, or
    spread over its way.

    A ``count`` of None is one of the network's own, or several new ones, as many as there are places for; where there
    are no logits, whose way they could cut, one. ``existing`` asks for the network's own blocks or for new ones; None
    takes its own where there are enough.
    """
    if to_logits:
        route = find_route(network, site, network.logits)
        count = count or 0
        hosts = _hosts(network, route, existing, count)
        return Placement(tuple(route), _chosen(network, hosts, count, site), True)
    kinds = [True, False] if existing is None else [existing]
    problem: SiteError | None = None
    for own in kinds:
        most = count or (1 if own or not network.has_logits else SEVERAL)
        for number in range(most, count - 1 if count else 0, -1):
            try:
                for route in _routes(network, site, own, number):
                    hosts = hosts_on(network, route, existing=own)
                    return Placement(tuple(route), _chosen(network, hosts, number, site), False)
            except SiteError as error:
                problem = problem or error
    what = {True: "no squeeze-and-excite block of its own", False: "no convolution to put gates before"}[kinds[-1]]
    raise problem or SiteError(f"the signal from {site} comes to {what}")


def _hosts(network: Network, route: list[fx.Node], existing: bool | None, count: int) -> list[Host]:
    if existing is not None:
        return hosts_on(network, route, existing=existing)
    own = hosts_on(network, route, existing=True)
    return own if len(own) >= count > 0 else hosts_on(network, route, existing=False)


def _routes(network: Network, site: str, existing: bool, count: int) -> Iterator[list[fx.Node]]:
    """Routes with enough places for gates, the shortest first; for several gates, the one to the logits before all."""
    if count > 1 and network.has_logits:
        with suppress(SiteError):
            route = find_route(network, site, network.logits)
            if len(hosts_on(network, route, existing=existing)) >= count:
                yield route
    for route, spread in routes_from(network, site):
        goals: list[fx.Node] = []
        if existing:
            goals = [b.product for b in network.blocks.values() if any(c.node is b.product for c in spread.came_from)]
        else:
            goals = [r.reader for r in spread.readings if can_stand_before(network, r.reader)]
        for goal in goals:
            if len(hosts_on(network, [*route, goal], existing=existing)) >= count:
                yield [*route, goal]


def _chosen(network: Network, hosts: list[Host], count: int, site: str) -> tuple[Host, ...]:
    """So many hosts, in the signal's order: several cut the network where they can, and are spread out otherwise."""
    if count > len(hosts):
        raise SiteError(f"the signal from {site} passes {len(hosts)} places for gates: expected {count}")
    if count < 2:
        return tuple(hosts[:count])
    cuts = _cuts(network, hosts) if network.has_logits else []  # what has many outputs leaves by many ways
    fitting = (_spread_out(cuts, number) for number in range(len(cuts), -1, -1))
    chosen = next(own for cut in fitting if len(own := list(itertools.chain(*cut))) <= count)
    rest = [host for host in hosts if host not in chosen]
    chosen += _spread_out(rest, count - len(chosen))
    return tuple(host for host in hosts if host in chosen)


def _cuts(network: Network, hosts: list[Host]) -> list[list[Host]]:
    """Sets of places that together stand in the way of everything: all layers that read a map, say, which is all that
    comes from before."""
    if any(host.block for host in hosts):
        return [[host] for host in hosts if host.block and network.cuts(host.block.output)]
    maps: dict[fx.Node, list[Host]] = {}
    for host in hosts:
        maps.setdefault(_reader(host).all_input_nodes[0], []).append(host)
    return [own for map, own in maps.items() if set(map.users) == {h.reader for h in own} and network.cuts(map)]


def _spread_out(items: list[Item], count: int) -> list[Item]:
    if count < 2:
        return items[:count]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
