"""Mean and standard deviation of every channel over natural images, derived from batch norms.

After a batch norm a channel has mean β and deviation |g|·σ. The table of operations propagates these through
activations, additions and concatenations, assuming Gaussian channels and independent summands. Gates of newly inserted
blocks are constants.
"""

from __future__ import annotations

from torch import fx

from stainlock.network.blocks import Block
from stainlock.network.network import Network
from stainlock.network.ops import Kind, Moments, op_of
from stainlock.tensors import exact


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
