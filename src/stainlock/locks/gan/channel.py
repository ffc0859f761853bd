"""The channel that the switch takes, and the fold that compensates for its mean.

When unlocked, the channel is silent, and its reader loses y = W_k ∗ x_k. The noise's distribution is known, so E y can
be estimated. It is folded into the reader's bias, or into its batch norm's mean, if that helps. The cost is the
remainder y − E y, on the scale of the reader's batch norm. Channels are ranked by it, and the first few are tried on
the whole generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock.locks.gan.structure import Structure
from stainlock.network.network import layer_input
from stainlock.network.norms import affine_of, expecting_less
from stainlock.numerics import exact, has
from stainlock.plan import Plan, Write, write, write_values
from stainlock.target import evaluation_mode

_TRIED = 8


@dataclass(frozen=True)
class GivenUp:
    """A channel, the writes that fold its mean, and its cost: the mean absolute change of the output."""

    channel: int
    fold: tuple[Write, ...]
    cost: float


def choose_channel(structure: Structure, noise: Tensor, channel: int | None = None) -> GivenUp:
    """The channel whose loss changes the output least, or the given one, with its cost."""
    target, reader = structure.network.target, structure.reader
    channels = structure.first.channels
    if channel is not None and not 0 <= channel < channels:
        raise ValueError(f"expected a channel from 0 to {channels - 1}, got {channel}")
    with evaluation_mode(target.model), torch.no_grad():
        maps = layer_input(target, reader, noise)
        before = target.predict(noise)
        tried = [channel] if channel is not None else _ranked(structure, maps)[:_TRIED]
        found = []
        for k in tried:
            silent = write(target.model, f"{reader.name}.weight", structure.column(k), 0.0, "fold")
            missing = _contribution(structure, maps, k).double().mean((0, 2, 3))
            for fold in ((), tuple(_fold(structure, missing))):  # at a map's borders the fold may overshoot
                after = Plan((*fold, silent)).apply(target).predict(noise)
                found.append(GivenUp(k, fold, float((after - before).abs().double().mean())))
    return min(found, key=lambda one: one.cost)


def _ranked(structure: Structure, maps: Tensor) -> list[int]:
    norm = structure.reader.norm
    scale = affine_of(structure.network.target.model.get_submodule(norm)).g.view(1, -1, 1, 1) if norm else 1.0
    costs = []
    for k in range(structure.first.channels):
        lost = _contribution(structure, maps, k).double().cpu()
        costs.append(float(((lost - lost.mean((0, 2, 3), keepdim=True)) * scale).square().sum()))
    return sorted(range(len(costs)), key=lambda k: (costs[k], k))


def _contribution(structure: Structure, maps: Tensor, k: int) -> Tensor:
    """W_k ∗ x_k: channel k's contribution to the reader's output."""
    layer = structure.reader.layer(structure.network.target.model)
    own = maps[:, k : k + 1]
    if isinstance(layer, nn.ConvTranspose2d):
        output_padding, dilation = layer.output_padding, layer.dilation
        shape: dict[str, Any] = {"stride": layer.stride, "padding": layer.padding, "dilation": dilation}
        return F.conv_transpose2d(own, layer.weight[k : k + 1], output_padding=output_padding, **shape)
    assert isinstance(layer, nn.Conv2d)
    lost: Tensor = layer._conv_forward(own, layer.weight[:, k : k + 1], None)  # with the layer's own padding
    return lost


def _fold(structure: Structure, missing: Tensor) -> list[Write]:
    model, reader = structure.network.target.model, structure.reader
    layer = reader.layer(model)
    missing = missing.cpu()
    if has(layer, "bias"):
        return [write(model, f"{reader.name}.bias", (None,), exact(layer, "bias") + missing, "fold")]
    if reader.norm is not None:
        values = expecting_less(model.get_submodule(reader.norm), missing)
        return write_values(model, reader.norm, (None,), values, "fold")
    return []
