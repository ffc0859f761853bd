"""What each dense layer loses with each of its inputs, when a lock's signal takes the channel.

Batch norms remember natural images, so that a channel's variance is known where one tells of it
(`stainlock.network.moments`); elsewhere a few synthetic inputs stand in.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from stainlock.network.moments import remembered
from stainlock.network.network import Network
from stainlock.network.norms import affine_of, is_batch_norm
from stainlock.network.ops import Moments
from stainlock.probes import probe_inputs
from stainlock.target import evaluation_mode
from stainlock.tensors import exact

# The power of a channel's estimated variance in a residual stream. On ResNet50's streams, of what was tried, this ranks
# channels most like natural images do.
_STREAM = 0.25


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


def _measured_energy(network: Network, layers: list[fx.Node]) -> dict[fx.Node, Tensor]:
    """Mean square of every input of these layers, on synthetic inputs."""
    target, energy = network.target, {}

    def record(node: fx.Node) -> Any:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            energy[node] = given[0].double().square().transpose(0, 1).flatten(1).mean(1).cpu()

        return hook

    with ExitStack() as hooks, evaluation_mode(target.model), torch.no_grad():
        for node in layers:
            hooks.enter_context(network.part.leaf(node).register_forward_pre_hook(record(node)))
        target.run_traced(probe_inputs(target, "channel cost"))
    return energy
