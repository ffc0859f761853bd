"""Receptive fields: which pixels one position of a layer sees.

A field is followed node by node through the traced graph. An op without a rule, or one that mixes all positions
(attention, a pooled gate, a dense layer on a flattened map), sees the whole input: always true, never tight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.pooling import _AvgPoolNd, _MaxPoolNd
from torch.nn.modules.utils import _pair

from stainlock.network.graph import TracedPart, is_batch_norm, node_activation, operation

_POSITIONWISE_NAMES = {
    "add", "iadd", "sub", "mul", "imul", "truediv", "cat", "concat", "dropout", "dropout2d", "stochastic_depth",
    "drop_path", "contiguous", "clone", "neg",
}  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """Along one axis, position i sees pixels ``start + jump·i … start + jump·i + size − 1``."""

    size: int = 1
    jump: int = 1
    start: int = 0

    def through(self, kernel: int, stride: int, padding: int, dilation: int = 1) -> Axis:
        return Axis(
            self.size + (kernel - 1) * dilation * self.jump,
            self.jump * stride,
            self.start - padding * self.jump,
        )

    def interval(self, position: int, pixels: int) -> tuple[int, int]:
        """First pixel and one past the last that the position sees, clipped to the input."""
        first = self.start + self.jump * position
        return max(first, 0), min(first + self.size, pixels)


Field = tuple[Axis, Axis]  # vertical, horizontal


def receptive_fields(
    part: TracedPart, shapes: dict[fx.Node, tuple[int, ...]], image: fx.Node
) -> dict[fx.Node, Field | None]:
    """The field of every node's output; None means the whole input."""
    fields: dict[fx.Node, Field | None] = {image: (Axis(), Axis())}
    for node in part.graph.nodes:
        if node is image:
            continue
        sources = [fields[n] for n in node.all_input_nodes if n in fields and len(shapes.get(n, ())) > 0]
        if node.op in ("placeholder", "get_attr") or not sources:
            continue  # depends on no pixel
        fields[node] = None if None in sources else _rule(part, node, [f for f in sources if f], shapes)
    return fields


def _rule(
    part: TracedPart, node: fx.Node, sources: list[Field], shapes: dict[fx.Node, tuple[int, ...]]
) -> Field | None:
    if len(shapes.get(node, ())) != 4:
        return None
    leaf = part.leaf(node) if node.op == "call_module" else None
    source_shape = shapes.get(node.all_input_nodes[0], ())
    if isinstance(leaf, nn.Conv2d):
        return input_field(leaf, sources[0], source_shape)
    if isinstance(leaf, _MaxPoolNd | _AvgPoolNd):
        return _window(sources[0], leaf.kernel_size, leaf.stride, leaf.padding, getattr(leaf, "dilation", 1))
    if operation(part, node) in ("max_pool2d", "avg_pool2d"):
        kernel, stride, padding, dilation = _pool_arguments(node)
        return _window(sources[0], kernel, stride or kernel, padding, dilation)
    positionwise = (
        is_batch_norm(leaf)
        or node_activation(part, node) is not None
        or isinstance(leaf, nn.Identity | nn.Dropout | nn.Dropout2d)
        or operation(part, node) in _POSITIONWISE_NAMES | {"StochasticDepth", "DropPath"}
    )
    if not positionwise:
        return None
    # A factor of one pixel (a pooled gate) would broadcast, a concatenation may lengthen: equal sizes share positions.
    sizes = {shapes[n][2:] for n in (node, *node.all_input_nodes) if len(shapes.get(n, ())) == 4}
    return _union(sources) if len(sizes) == 1 else None


def input_field(layer: nn.Module, source: Field, source_shape: tuple[int, ...]) -> Field | None:
    """The field of a convolution's output, from that of its input."""
    if not isinstance(layer, nn.Conv2d):
        return None
    if type(layer) is nn.Conv2d and not isinstance(layer.padding, str):
        padding = layer.padding
    else:  # a subclass may pad as it likes: look at what it does
        padding = (_leading_padding(layer, source_shape, 2), _leading_padding(layer, source_shape, 3))
    return _window(source, layer.kernel_size, layer.stride, padding, layer.dilation)


def _leading_padding(layer: nn.Conv2d, shape: tuple[int, ...], axis: int) -> int:
    """How many rows the layer puts before the first: NaN marks the last row that output 0 still sees."""
    reach = (layer.kernel_size[axis - 2] - 1) * layer.dilation[axis - 2]
    for row in range(min(reach, shape[axis] - 1), -1, -1):
        probe = torch.zeros(1, *shape[1:], device=layer.weight.device, dtype=layer.weight.dtype)
        probe.select(axis, row).fill_(float("nan"))
        with torch.no_grad():
            if layer(probe).select(axis, 0).isnan().any():
                return reach - row
    return reach


def _window(source: Field, kernel: Any, stride: Any, padding: Any, dilation: Any = 1) -> Field:
    vertical, horizontal = (
        axis.through(int(k), int(s), int(p), int(d))
        for axis, k, s, p, d in zip(source, _pair(kernel), _pair(stride), _pair(padding), _pair(dilation), strict=True)
    )
    return vertical, horizontal


def _pool_arguments(node: fx.Node) -> tuple[Any, Any, Any, Any]:
    names = ("kernel_size", "stride", "padding", "dilation")
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    dilation = given.get("dilation", 1) if operation_is_max(node) else 1
    return given["kernel_size"], given.get("stride"), given.get("padding", 0), dilation


def operation_is_max(node: fx.Node) -> bool:
    return "max" in str(getattr(node.target, "__name__", node.target))


def _union(sources: list[Field]) -> Field | None:
    merged = []
    for axes in zip(*sources, strict=True):
        if len({axis.jump for axis in axes}) > 1:
            return None
        start = min(axis.start for axis in axes)
        merged.append(Axis(max(axis.start + axis.size for axis in axes) - start, axes[0].jump, start))
    return merged[0], merged[1]
