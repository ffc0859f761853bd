"""Where a lock's disruptors go: the way of its signal, and which of the places for gates on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import fx

from stainlock.errors import SiteError
from stainlock.insertion import Insertion, moved
from stainlock.locks.parts.gates import GateForm, new_block
from stainlock.locks.parts.hosts import Host, can_stand_before, hosts_on
from stainlock.locks.parts.route import find_route, routes_from
from stainlock.network.blocks import Block
from stainlock.network.network import Network

Item = TypeVar("Item")


class FindHosts(Protocol):
    """The places for gates along a route."""

    def __call__(self, route: list[fx.Node], *, existing: bool) -> list[Host]: ...


# Gates of a lock unless its owner asks for another number: the first that stand in the way of everything, at two places
# or more, until so many channels have a secret gain; or, where there are too few such places, so many gates. What a
# thief gets from guessing grows less with each, and so does what the signal's way leaves of the model.
SECRETS, LEAST_CUTS = 256, 2
SEVERAL = 6


@dataclass(frozen=True)
class Placement:
    """A route and the gates on it. ``to_logits`` says whether it goes on to the logits."""

    route: tuple[fx.Node, ...]
    hosts: tuple[Host, ...]
    to_logits: bool

    def insertions(self, network: Network, form: GateForm) -> tuple[Insertion, ...]:
        """Blocks before larger modules come first: whatever is inside these has another name then."""
        new = sorted((host for host in self.hosts if host.readers), key=lambda host: host.at.count("."))
        ats: list[str] = []
        for host in new:
            ats.append(moved(host.at, ats))
        return tuple(new_block(network, at, host.readers, form) for at, host in zip(ats, new, strict=True))

    def carried_over(self, before: Network, after: Network) -> tuple[list[fx.Node], tuple[Block, ...]]:
        """The route and its blocks in the network that has the new ones."""
        gated = [insertion.at for insertion in after.target.insertions[len(before.target.insertions) :]]

        def node(old: fx.Node) -> fx.Node:
            found: fx.Node = after.nodes[moved(before.name(old), gated)]
            return found

        def block(host: Host) -> Block:
            if host.block is not None:
                second = moved(before.name(host.block.second), gated)
                return next(b for b in after.blocks.values() if after.name(b.second) == second)
            readers = {node(reader) for reader in host.readers}
            return next(b for b in after.blocks.values() if set(b.output.users) == readers)

        blocks = tuple(block(host) for host in self.hosts)
        if self.to_logits:
            return [node(n) for n in self.route], blocks
        last = self.hosts[-1].wire
        return [*(node(n) for n in self.route[: last + 1]), blocks[-1].product], blocks


def place_gates(
    network: Network, site: str, count: int | None, *, existing: bool | None, to_logits: bool, several: bool = False
) -> Placement:
    """Gates for a signal from a site: one at the first place it comes to, several where nothing gets past them, or
    spread over its way.

    A ``count`` of None is one of the network's own, or several new ones: enough in the way of everything, or as many as
    there are places for; where there are no logits, whose way they could cut, one. ``existing`` asks for the network's
    own blocks or for new ones; None takes its own where there are enough. ``several`` is for several detectors.
    """
    find = partial(hosts_on, network, several=several)
    if to_logits:
        route = find_route(network, site, network.logits)
        count = count or 0
        hosts = _hosts(find, route, existing, count)
        return Placement(tuple(route), _chosen(network, hosts, count, site), True)
    kinds = [True, False] if existing is None else [existing]
    problem: SiteError | None = None
    for own in kinds:
        if count is None and not own and network.has_logits:
            with suppress(SiteError):
                route = find_route(network, site, network.logits)
                if enough := _first_cuts(network, find(route, existing=False)):
                    return Placement(tuple(route), enough, False)
        most = count or (1 if own or not network.has_logits else SEVERAL)
        for number in range(most, count - 1 if count else 0, -1):
            try:
                for route in _routes(network, site, find, own, number):
                    hosts = find(route, existing=own)
                    return Placement(tuple(route), _chosen(network, hosts, number, site), False)
            except SiteError as error:
                problem = problem or error
    what = {True: "no squeeze-and-excite block of its own", False: "no convolution to put gates before"}[kinds[-1]]
    raise problem or SiteError(f"the signal from {site} comes to {what}")


def _hosts(find: FindHosts, route: list[fx.Node], existing: bool | None, count: int) -> list[Host]:
    if existing is not None:
        return find(route, existing=existing)
    own = find(route, existing=True)
    return own if len(own) >= count > 0 else find(route, existing=False)


def _routes(network: Network, site: str, find: FindHosts, existing: bool, count: int) -> Iterator[list[fx.Node]]:
    """Routes with enough places for gates, the shortest first; for several gates, the one to the logits before all."""
    if count > 1 and network.has_logits:
        with suppress(SiteError):
            route = find_route(network, site, network.logits)
            if len(find(route, existing=existing)) >= count:
                yield route
    for route, spread in routes_from(network, site):
        goals: list[fx.Node] = []
        if existing:
            goals = [b.product for b in network.blocks.values() if any(c.node is b.product for c in spread.came_from)]
        else:
            goals = [r.reader for r in spread.readings if can_stand_before(network, r.reader)]
        for goal in goals:
            if len(find([*route, goal], existing=existing)) >= count:
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


def _first_cuts(network: Network, hosts: list[Host]) -> tuple[Host, ...]:
    """The first places in the way of everything, until enough channels have a secret; none if they are too few."""
    chosen: list[Host] = []
    for number, cut in enumerate(_cuts(network, hosts), 1):
        chosen += cut
        if number >= LEAST_CUTS and sum(network.shapes[host.map][1] for host in chosen) >= SECRETS:
            return tuple(chosen)
    return ()


def _cuts(network: Network, hosts: list[Host]) -> list[list[Host]]:
    """Sets of places that together stand in the way of everything: all layers that read a map, say, which is all that
    comes from before."""
    if any(host.block for host in hosts):
        return [[host] for host in hosts if host.block and network.cuts(host.block.output)]
    maps: dict[fx.Node, list[Host]] = {}
    for host in hosts:
        maps.setdefault(host.map, []).append(host)
    readers = {map: {reader for host in own for reader in host.readers} for map, own in maps.items()}
    return [own for map, own in maps.items() if set(map.users) == readers[map] and network.cuts(map)]


def _spread_out(items: list[Item], count: int) -> list[Item]:
    if count < 2:
        return items[:count]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
