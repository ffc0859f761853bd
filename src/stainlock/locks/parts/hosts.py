"""Places for gates along a signal's way: blocks of the network's own, or modules that a new block can stand before."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx, nn

from stainlock.locks.parts.route import behind_activation
from stainlock.network.blocks import Block
from stainlock.network.network import Network
from stainlock.network.signals import Cell, spread


@dataclass(frozen=True)
class Host:
    """A place for a gate: a block of the network's own, or a module ``at`` that a new block can stand before: a layer,
    or what holds all the ``readers`` of a map.

    The signal passes it on the ``wire``-th part of its route.
    """

    wire: int
    block: Block | None = None
    at: str = ""
    readers: tuple[fx.Node, ...] = ()

    @property
    def map(self) -> fx.Node:
        """What is gated."""
        return self.block.squeezed if self.block else self.readers[0].all_input_nodes[0]


def hosts_on(network: Network, route: list[fx.Node], *, existing: bool, several: bool = False) -> list[Host]:
    """The places for gates along a route, in the order in which the signal passes them.

    Where ``several`` detectors must all be present, these are behind the layer that sees to that.
    """
    found: list[Host] = []
    for wire, (writer, exit) in enumerate(itertools.pairwise(route)):
        reached = spread(network, Cell(writer, 0), exit if exit in network.blocks else None)
        end = next(reading.cell for reading in reached.readings if reading.reader is exit)
        passed = [cell.node for cell in reached.path(end)]
        if several:
            start = behind_activation(network, passed) if wire else None
            passed, several = ([], True) if start is None else (passed[start:], False)
        if existing:
            blocks = [b for b in network.blocks.values() if b.squeezed in passed]
            found += [Host(wire, block) for block in blocks]
        else:
            readers = dict.fromkeys(r.reader for r in reached.readings if r.cell.node in passed)
            found += _new_hosts(network, wire, [r for r in readers if can_stand_before(network, r)])
    return found


def _new_hosts(network: Network, wire: int, readers: list[fx.Node]) -> list[Host]:
    """A place before each reader, or before all that read the same map, where one module holds them."""
    found: list[Host] = []
    for map in dict.fromkeys(reader.all_input_nodes[0] for reader in readers):
        own = tuple(reader for reader in readers if reader.all_input_nodes[0] is map)
        shared = holder(network, map) if len(own) > 1 and set(own) == set(map.users) else None
        found += [Host(wire, at=shared, readers=own)] if shared else [
            Host(wire, at=network.name(reader), readers=(reader,)) for reader in own
        ]  # fmt: skip
    return found


def holder(network: Network, map: fx.Node) -> str | None:
    """The smallest module, called once, that is given a map and nothing else, and holds everything that reads it."""
    around = [network.around(user) for user in map.users]
    shared = [step for step in around[0] if all(step in own for own in around)]
    for name in reversed(shared):
        inside = [n for n in network.part.graph.nodes if name in network.around(n)]
        given = {a for n in inside for a in n.all_input_nodes if a not in set(inside)}
        if given == {map} and network.calls_of(name) == 1:
            return network.path(name)
    return None


def can_stand_before(network: Network, reader: fx.Node) -> bool:
    """A convolution over a map, called once, can have gates put before it; a block's own layers can't."""
    leaf = network.leaf(reader)
    if not isinstance(leaf, nn.Conv2d) or leaf.groups != 1 or network.calls[str(reader.target)] > 1:
        return False
    inner = {n for block in network.blocks.values() for n in (block.first, block.second)}
    return reader not in inner and network.area(reader.all_input_nodes[0]) > 1
