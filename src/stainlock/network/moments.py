"""How much each dense layer would miss each of its inputs, without data.

Batch norms remember natural inputs: behind one, a channel has mean β and deviation γ. These moments are followed
through activations, additions, concatenations and new blocks, as if channels were Gaussian and blocks independent.
Where no batch norm tells, a few synthetic inputs stand in.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from stainlock.channel_cost import _through_activation, affine_of
from stainlock.network.blocks import RESHAPES, Block
from stainlock.network.graph import is_batch_norm, keeps_channels, operation
from stainlock.network.wires import Network
from stainlock.target import evaluation_mode
from stainlock.tensors import exact
from stainlock.trigger import synthetic_inputs

_PROBES = 4
# The power of a channel's estimated variance in a residual stream. On ResNet50's streams, of what was tried, this ranks
# channels most like natural images do.
_STREAM = 0.25
Moments = tuple[Tensor, Tensor]  # mean and deviation of every channel


def dense_layers(network: Network) -> list[fx.Node]:
    return [
        n for n in network.part.graph.nodes
        if isinstance(layer := network.leaf(n), nn.Conv2d | nn.Linear) and getattr(layer, "groups", 1) == 1
    ]  # fmt: skip


def column_shares(network: Network) -> dict[fx.Node, Tensor]:
    """For every dense layer, each input's share of the energy of its outputs."""
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
    """What a layer loses with each channel of a map: its variance, since the mean can go into a bias.

    In a residual stream that is a poor estimate, blocks being anything but independent: there it counts for less.
    """
    variance = known[node][1].square().clamp(min=1e-30)
    while not is_batch_norm(network.leaf(node)):
        sources = [n for n in node.all_input_nodes if n in known]
        if len(sources) != 1:
            return variance**_STREAM
        (node,) = sources
    return variance


def remembered(network: Network) -> dict[fx.Node, Moments]:
    """Mean and deviation of every channel that batch norms tell of."""
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
    """What a new block makes of a map, unlocked: its gates are constants, and so is what it adds."""
    if block.squeezed not in known:
        return None
    mean, deviation = known[block.squeezed]
    gains = block.gate.function(exact(network.part.leaf(block.second), "bias"))
    shift = exact(network.part.leaf(block.shift), "bias") if block.shift is not None and node is block.output else 0.0
    return gains * mean + shift, gains.abs() * deviation


def _moments(network: Network, node: fx.Node, known: dict[fx.Node, Moments]) -> Moments | None:
    name, activation = operation(network.part, node), network.activation(node)
    sources = [n for n in node.all_input_nodes if n in network.shapes]
    if is_batch_norm(leaf := network.leaf(node)):
        affine = affine_of(leaf)  # type: ignore[arg-type]
        moments = affine.mean, affine.deviation
        return _through_activation(activation, *moments) if activation else moments
    if not sources or any(s not in known for s in sources):
        return None
    first = known[sources[0]]
    if activation is not None:
        return _through_activation(activation, *first)
    if name in ("add", "iadd", "add_") and len(sources) == 2:
        other = known[sources[1]]
        return first[0] + other[0], (first[1].square() + other[1].square()).sqrt()
    if name in ("cat", "concat") and network.shapes[node][1] == sum(len(known[s][0]) for s in sources):
        return torch.cat([known[s][0] for s in sources]), torch.cat([known[s][1] for s in sources])
    if name in ("pad", "constant_pad_nd", "ZeroPad2d") and (before := network.padding(node)) is not None:
        wide = network.shapes[node][1]
        padded = [torch.zeros(wide, dtype=torch.float64) for _ in first]
        for one, values in zip(padded, first, strict=True):
            one[before[0] : before[0] + len(values)] = values
        return padded[0], padded[1]
    if keeps_channels(network.part, node) or name == "getitem":
        return first
    if name in RESHAPES and len(network.shapes[node]) == 2:
        area = math.prod(network.shapes[sources[0]][2:])
        return first[0].repeat_interleave(area), first[1].repeat_interleave(area)
    return None


def _measured_energy(network: Network, layers: list[fx.Node]) -> dict[fx.Node, Tensor]:
    """Mean square of every input of these layers, on inputs that need no data."""
    target, energy = network.target, {}

    def record(node: fx.Node) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            energy[node] = given[0].double().square().transpose(0, 1).flatten(1).mean(1).cpu()

        return hook

    handles = [network.part.leaf(n).register_forward_pre_hook(record(n)) for n in layers]
    try:
        with evaluation_mode(target.model), torch.no_grad():
            target.run_traced(synthetic_inputs(target, _PROBES, torch.Generator().manual_seed(0)))
    finally:
        for handle in handles:
            handle.remove()
    return energy
