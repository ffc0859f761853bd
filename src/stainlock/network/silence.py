"""Going back along a channel to who writes it, so that what a residual stream adds to the signal can be silenced."""

from __future__ import annotations

import math

from torch import nn

from stainlock.network.graph import _channels_ahead, _same_channels, is_batch_norm, keeps_channels, operation
from stainlock.network.wires import Cell, Network
from stainlock.tensors import has


def silenced_at(network: Network, cell: Cell, carried: set[Cell]) -> list[Cell]:
    """Cells to write zeros into, so that this one is zero: the last batch norms or layers that write it."""
    if cell in carried:
        raise network.stop(cell.node, "the signal would be added to itself: choose a site behind it").error()
    node, leaf = cell.node, network.leaf(cell.node)
    name = operation(network.part, node)
    writes_it = isinstance(leaf, nn.Conv2d | nn.Linear) or is_batch_norm(leaf)
    if writes_it and network.calls[str(node.target)] == 1 and has(leaf, "weight"):  # type: ignore[arg-type]
        return [cell]
    sources = [n for n in node.all_input_nodes if n in network.shapes]
    activation = None if writes_it else network.activation(node)
    if activation is not None and network.rests_at_zero(node, activation):
        return silenced_at(network, Cell(sources[0], cell.channel, cell.repeat), carried)
    if name in ("pad", "ZeroPad2d", "constant_pad_nd") and (before := network.padding(node)) is not None:
        inside = cell.channel - before[0]
        width = network.shapes[sources[0]][1]
        return silenced_at(network, Cell(sources[0], inside), carried) if 0 <= inside < width else []
    if name in ("cat", "concat"):
        for source in sources:
            before_it = _channels_ahead(source, node, network.shapes)
            if before_it is not None and before_it <= cell.channel < before_it + network.shapes[source][1]:
                return silenced_at(network, Cell(source, cell.channel - before_it), carried)
    if name in ("add", "iadd", "add_") and _same_channels(node, network.shapes):
        return [c for s in sources for c in silenced_at(network, Cell(s, cell.channel), carried)]
    if keeps_channels(network.part, node) or name == "getitem":
        return silenced_at(network, Cell(sources[0], cell.channel, cell.repeat), carried)
    if name in ("mul", "imul") and len(sources) == 2:  # whatever the gate, nothing times it is nothing
        gated = max(sources, key=lambda s: math.prod(network.shapes[s]))
        return silenced_at(network, Cell(gated, cell.channel), carried)
    raise network.stop(node, "what it adds to the signal can't be silenced: choose a site behind it").error()
