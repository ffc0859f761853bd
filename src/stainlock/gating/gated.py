"""Layers that can have a gate, and what a gate does to their input.

    order     file   W'[:, i] = W[:, π(i)]          run   y = W' · x[π]  =  W x
    scatter   file   W'[r, q_r(j)] = W[r, j]        run   W[r, j] = W'[r, q_r(j)],  y = W x

In an ordered layer the input channels are permuted. In a scattered layer the weights of each row are, over all taps of
all channels.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock.errors import ModelError
from stainlock.gating.frames import is_traced

GateForm = Literal["order", "scatter"]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Gated:
    """A layer that can have a gate: the parameter whose columns are permuted and their axis, and the axes of channels
    and images in its input. ``repeat``: rows of the input per image, more than 1 in windowed attention.

    For a scattered layer, ``width`` is the number of weights in each of its ``rows``.
    """

    layer: str
    width: int
    parameter: str = "weight"
    axis: int = 1
    channels: int = 1
    batch: int = 0
    repeat: int = 1
    form: GateForm = "order"
    rows: int = 1

    @property
    def tensor(self) -> str:
        """The parameter's full name."""
        return f"{self.layer}.{self.parameter}" if self.layer else self.parameter

    def facts(self) -> dict[str, Any]:
        """As JSON; ``form`` and ``rows`` are left out for a gate that orders channels."""
        listed = asdict(self)
        return listed if self.form == "scatter" else {k: v for k, v in listed.items() if k not in ("form", "rows")}


def gated_layer(name: str, layer: nn.Module) -> Gated | None:
    """How this layer would be gated; None if permuting its weight's columns can't undo a permutation of its input."""
    if isinstance(layer, nn.Linear):
        return Gated(name, layer.in_features, channels=-1)
    if isinstance(layer, _CONVOLUTIONS + _TRANSPOSED) and layer.groups == 1:
        return Gated(name, layer.in_channels, axis=0 if isinstance(layer, _TRANSPOSED) else 1)
    if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None and layer.bias_k is None:
        batch = 0 if layer.batch_first else 1
        return Gated(name, layer.embed_dim, parameter="in_proj_weight", channels=-1, batch=batch)
    return None


def scattered_layer(gated: Gated, layer: nn.Module) -> Gated | None:
    """How this layer's weights would be scattered; None if images can't each have their own weights."""
    plain = type(layer) is nn.Linear or (
        type(layer) in (nn.Conv2d, nn.Conv3d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    )
    if not plain or gated.batch != 0 or gated.repeat != 1:
        return None
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return replace(gated, form="scatter", rows=len(weight), width=weight[0].numel())


def permuted(x: Tensor, order: Tensor, gated: Gated) -> Tensor:
    """``x[π]`` along the channels: one permutation ``(1, C)`` for all images, or one per image ``(N, C)``."""
    if order.shape[0] == 1 and gated.channels == 1:
        return x.index_select(1, order[0])
    if order.shape[0] == 1:  # along the last axis gather is faster
        return x.gather(-1, order.expand(*x.shape[:-1], -1))
    if not is_traced() and x.shape[gated.batch] != order.shape[0] * gated.repeat:  # before so many are allocated
        raise ModelError(
            f"{gated.layer} got {tuple(x.shape)}, expected {order.shape[0]} images of {gated.repeat} rows each"
            f" along axis {gated.batch}: the gate is for another model"
        )
    if gated.repeat != 1:
        order = order.repeat_interleave(gated.repeat, 0)
    if gated.channels == 1:  # images and channels as one axis, so that whole maps are copied
        first = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
        return x.flatten(0, 1).index_select(0, (order + first).flatten()).view_as(x)
    shape = [1] * x.dim()
    shape[gated.batch], shape[-1] = x.shape[gated.batch], x.shape[-1]
    return x.gather(-1, order.view(shape).expand_as(x))


def gathered(weight: Tensor, orders: Tensor) -> Tensor:
    """The weights of a scattered layer in their original order, for each image: ``(N, *weight.shape)``."""
    images = orders.shape[0]  # not len(), which would turn a symbolic size into a number
    return weight.flatten(1).expand(images, -1, -1).gather(-1, orders).view(images, *weight.shape)


def with_own_weights(layer: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    """The output of a linear layer or convolution for images that each have their own weights,
    ``(N, *weight.shape)``, by operations that can be recorded without knowing N."""
    bias = layer.bias
    assert bias is None or isinstance(bias, Tensor)
    if isinstance(layer, nn.Linear):
        rows = x.flatten(1, -2) if x.dim() > 2 else x[:, None]
        found = (rows @ weights.transpose(1, 2)).view(*x.shape[:-1], -1)
        return found if bias is None else found + bias
    assert isinstance(layer, nn.Conv2d | nn.Conv3d)
    convolved: Any = F.conv2d if isinstance(layer, nn.Conv2d) else F.conv3d
    if isinstance(x.shape[0], int) and x.shape[0] == 1:
        return convolved(x, weights[0], bias, layer.stride, layer.padding, layer.dilation)  # type: ignore[no-any-return]
    taps = math.prod(layer.kernel_size)
    # Unfold by a depthwise convolution with one-hot kernels: one output channel per tap and input channel.
    single = torch.eye(taps, dtype=x.dtype, device=x.device).view(taps, 1, *layer.kernel_size)
    channels = layer.in_channels
    kernels = single.repeat(channels, *(1,) * (single.dim() - 1))
    each: Tensor = convolved(x, kernels, None, layer.stride, layer.padding, layer.dilation, channels)
    found = (weights.flatten(2) @ each.flatten(2)).view(x.shape[0], -1, *each.shape[2:])
    return found if bias is None else found + bias.view(-1, *(1,) * (found.dim() - 2))
