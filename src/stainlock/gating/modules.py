"""The reader and the gates of a keyed lock as modules instead of hooks, for tools that trace with torch.fx.

Such tools trace `forward` and drop a model's hooks, and converting a layer to 8 bits drops its hooks too. Here each
gated layer is wrapped in a module that permutes its input, and the model in one that reads the patch first. A tracer
sees each of these steps as one function call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock.gating.gated import Gated, permuted
from stainlock.gating.gates import Gate, Reader
from stainlock.gating.own_weights import by_own_weights
from stainlock.gating.reader import Layout
from stainlock.gating.schedule import Schedule


@torch.fx.wrap
def read_patch(images: Tensor, lock: str, layout: Layout, schedule: Schedule) -> Tensor:
    """What the network sees of these images; their permutations are stored for the gates."""
    return Reader(lock, layout, schedule).read(images)


@torch.fx.wrap
def through_gate(x: Tensor, lock: str, number: int, gated: Gated) -> Tensor:
    """``x[π]``."""
    return permuted(x, Gate(lock, number, gated).orders().orders[number], gated)


@torch.fx.wrap
def by_scattered(
    x: Tensor, weight: Tensor, bias: Tensor | None, lock: str, number: int, gated: Gated, settings: tuple[Any, ...]
) -> Tensor:
    """The output of a scattered layer; ``settings``: stride, padding, dilation and groups of a convolution."""
    multiply: Any = {2: F.linear, 4: F.conv2d, 5: F.conv3d}[weight.dim()]
    return by_own_weights(
        multiply, x, weight, Gate(lock, number, gated).orders().rows(number, gated.rows), bias, *settings
    )


class _Around(nn.Module):
    """A wrapper that takes a module's place and exposes its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class ReadFirst(_Around):
    """The module that takes the images, with the reader before it."""

    def __init__(self, layer: nn.Module, lock: str, layout: Layout, schedule: Schedule) -> None:
        super().__init__(layer)
        self.lock, self.layout, self.schedule = lock, layout, schedule

    def forward(self, images: Tensor) -> Any:
        return self.layer(read_patch(images, self.lock, self.layout, self.schedule))


class _Gated(_Around):
    """A gated layer, its lock, and the number of its gate."""

    def __init__(self, layer: nn.Module, lock: str, number: int, gated: Gated) -> None:
        super().__init__(layer)
        self.lock, self.number, self.gated = lock, number, gated

    def _ordered(self, x: Tensor) -> Tensor:
        return through_gate(x, self.lock, self.number, self.gated)


class LayerBehindGate(_Gated):
    """A layer with its gate before it."""

    def forward(self, x: Tensor) -> Any:
        return self.layer(self._ordered(x))


class AttentionBehindGate(_Gated):
    """An attention layer with its gate before it; a tensor passed three times stays one tensor."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        ordered = self._ordered(query)
        keys = ordered if key is query else self._ordered(key)
        values = keys if value is key else self._ordered(value)
        return self.layer(ordered, keys, values, **options)


class ScatteredLayer(_Gated):
    """A scattered layer. Its weights are in order only while it runs, so they stay in floats."""

    def forward(self, x: Tensor) -> Any:
        layer: Any = self.layer
        settings = () if isinstance(layer, nn.Linear) else (layer.stride, layer.padding, layer.dilation, layer.groups)
        return by_scattered(x, layer.weight, layer.bias, self.lock, self.number, self.gated, settings)


def behind_gate(layer: nn.Module, lock: str, number: int, gated: Gated) -> nn.Module:
    """Wrap a layer together with its gate."""
    inner = layer
    while isinstance(inner, _Around):
        inner = inner.layer
    if gated.form == "scatter":
        return ScatteredLayer(layer, lock, number, gated)
    if isinstance(inner, nn.MultiheadAttention):
        return AttentionBehindGate(layer, lock, number, gated)
    return LayerBehindGate(layer, lock, number, gated)
