"""Operations with weights, and pooling, as submodules.

A file may pad one side more than the other; the padding is then a separate step before the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock.errors import ModelError
from stainlock.models.onnx_import.building import Builder, Weights
from stainlock.models.onnx_import.graph import attributes, told
from stainlock.models.onnx_import.network import Value

_CONVOLUTIONS: dict[str, dict[int, Any]] = {
    "Conv": {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d},
    "ConvTranspose": {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d},
}
_NORMS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def linear(builder: Builder, node: Any, output: str, weights: Weights) -> None:
    """A Linear, which multiplies the last axis by a matrix."""
    rows, columns = weights["weight"][0].shape
    path = builder.layer(node, lambda: nn.Linear(columns, rows), weights)
    builder.step(output, path, Value(node.input[0]))


def gemm(builder: Builder, node: Any) -> None:
    said = attributes(node)
    weight, bias = builder.constant(node, 1), builder.constant(node, 2)
    plain = said.get("alpha", 1.0) == said.get("beta", 1.0) == 1.0 and not said.get("transA", 0)
    fits = bias is None and not builder.has(node, 2)
    if weight is not None and bias is not None:
        fits = bias.shape in ((weight.shape[0 if said.get("transB", 0) else 1],),)
    if plain and fits and weight is not None and weight.dim() == 2:
        turned = not said.get("transB", 0)
        weights = {"weight": builder.weight(node, 1, weight.T if turned else weight, turned=turned)}
        rows = len(weights["weight"][0])
        weights["bias"] = builder.no_bias(node, rows, weight) if bias is None else builder.weight(node, 2, bias)
        linear(builder, node, node.output[0], weights)
        return
    given = [builder.value(name) for name in node.input if name]
    settings = (said.get("alpha", 1.0), said.get("beta", 1.0), said.get("transA", 0), said.get("transB", 0))
    builder.step(node.output[0], _general_product, *given[:2], given[2] if len(given) > 2 else None, *settings)


def _general_product(a: Tensor, b: Tensor, c: Any, alpha: float, beta: float, turn_a: int, turn_b: int) -> Tensor:
    product = alpha * ((a.T if turn_a else a) @ (b.T if turn_b else b))
    return product if c is None else product + beta * c


def convolution(builder: Builder, node: Any) -> None:
    said, weight = attributes(node), builder.constant(node, 1)
    if weight is None or (builder.has(node, 2) and builder.constant(node, 2) is None):
        raise ModelError(
            f"{told(node)} has weights that are not stored or depend on the image, which no layer supports"
        )
    kernel = list(weight.shape[2:])
    axes, groups = len(kernel), said.get("group", 1)
    stride, dilation = (list(said.get(name, [1] * axes)) for name in ("strides", "dilations"))
    turned = node.op_type == "ConvTranspose"
    weights: Weights = {"weight": builder.weight(node, 1, weight)}
    channels = (weight.shape[0], weight.shape[1] * groups) if turned else (weight.shape[1] * groups, weight.shape[0])
    bias = builder.constant(node, 2)
    weights["bias"] = builder.no_bias(node, channels[1], weight) if bias is None else builder.weight(node, 2, bias)
    source: Any = builder.value(node.input[0])
    if turned:
        pads = list(said.get("pads", [0] * 2 * axes))
        if pads[:axes] != pads[axes:] or said.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise ModelError(f"{told(node)} pads its sides unequally, which no layer of torch does")
        if "output_shape" in said:
            raise ModelError(f"{told(node)} has an output_shape, which no layer of torch has")
        more: dict[str, Any] = {"padding": pads[:axes], "output_padding": said.get("output_padding", [0] * axes)}
    else:
        pads = _pads(said, builder.example(node.input[0]).shape[2:], kernel, stride, dilation)
        if pads[:axes] != pads[axes:]:
            source = padded(builder, node, source, pads, 0.0)
            pads = [0] * 2 * axes
        more = {"padding": pads[:axes]}
    make = _CONVOLUTIONS[node.op_type][axes]
    path = builder.layer(
        node,
        lambda: make(*channels, kernel, stride, dilation=dilation, groups=groups, **more),
        weights,
    )
    builder.step(node.output[0], path, source)


def _pads(said: dict[str, Any], size: Any, kernel: list[int], stride: list[int], dilation: list[int]) -> list[int]:
    """Padding before every axis, then after every axis."""
    auto, axes = said.get("auto_pad", "NOTSET"), len(kernel)
    if auto in ("NOTSET", "VALID"):
        return list(said.get("pads", [0] * 2 * axes)) if auto == "NOTSET" else [0] * 2 * axes
    before, after = [], []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        whole = max(0, (-(-n // s) - 1) * s + (k - 1) * d + 1 - n)
        small, large = whole // 2, whole - whole // 2
        before.append(small if auto == "SAME_UPPER" else large)
        after.append(large if auto == "SAME_UPPER" else small)
    return before + after


def padded(builder: Builder, node: Any, source: Any, pads: list[int], value: float) -> Value:
    """The source with padding around it, as a separate step."""
    axes = len(pads) // 2
    sides = [side for axis in reversed(range(axes)) for side in (pads[axis], pads[axis + axes])]
    name = f"{node.output[0]} padded"
    builder.step(name, F.pad, source, sides, "constant", value)
    return Value(name)


def batch_norm(builder: Builder, node: Any) -> None:
    names = [name for name, tensor in nn.BatchNorm2d(1).state_dict().items() if tensor.dim()]  # in ONNX's order
    found = [builder.constant(node, place) for place in range(1, 5)]
    given = [own for own in found if own is not None]
    if len(given) != len(names) or attributes(node).get("training_mode", 0):
        raise ModelError(f"{told(node)} computes statistics of the batch: export the model in eval mode")
    weights = {name: builder.weight(node, i, own) for i, (name, own) in enumerate(zip(names, given, strict=True), 1)}
    eps = attributes(node).get("epsilon", 1e-5)
    make = _NORMS[builder.example(node.input[0]).dim()]
    path = builder.layer(node, lambda: make(len(given[0]), eps=eps), weights)
    builder.step(node.output[0], path, builder.value(node.input[0]))


def layer_norm(builder: Builder, node: Any) -> None:
    said, weight, given = attributes(node), builder.constant(node, 1), builder.example(node.input[0])
    axis = said.get("axis", -1) % given.dim()
    if weight is None or weight.shape != given.shape[axis:]:
        raise ModelError(f"{told(node)} has a scale that is not a constant of its own shape")
    weights: Weights = {"weight": builder.weight(node, 1, weight)}
    bias = builder.constant(node, 2)
    if bias is not None:
        weights["bias"] = builder.weight(node, 2, bias)
    shape, eps = list(given.shape[axis:]), said.get("epsilon", 1e-5)
    path = builder.layer(node, lambda: nn.LayerNorm(shape, eps=eps, bias=bias is not None), weights)
    builder.step(node.output[0], path, builder.value(node.input[0]))


def group_norm(builder: Builder, node: Any) -> None:
    said, weight, bias = attributes(node), builder.constant(node, 1), builder.constant(node, 2)
    channels = builder.example(node.input[0]).shape[1]
    if weight is None or bias is None or len(weight) != channels:
        raise ModelError(f"{told(node)} has scales other than one for each channel: use opset 21 or later")
    weights = {"weight": builder.weight(node, 1, weight), "bias": builder.weight(node, 2, bias)}
    path = builder.layer(
        node, lambda: nn.GroupNorm(said["num_groups"], channels, eps=said.get("epsilon", 1e-5)), weights
    )
    builder.step(node.output[0], path, builder.value(node.input[0]))


def instance_norm(builder: Builder, node: Any) -> None:
    given = [builder.value(name) for name in node.input]
    eps = attributes(node).get("epsilon", 1e-5)
    builder.step(node.output[0], F.instance_norm, given[0], None, None, given[1], given[2], True, 0.1, eps)


def pool(builder: Builder, node: Any) -> None:
    said, given = attributes(node), builder.example(node.input[0])
    kernel = list(said["kernel_shape"])
    axes = len(kernel)
    stride, dilation = (list(said.get(name, [1] * axes)) for name in ("strides", "dilations"))
    pads = _pads(said, given.shape[2:], kernel, stride, dilation)
    source: Any = builder.value(node.input[0])
    largest, ceil = node.op_type == "MaxPool", bool(said.get("ceil_mode", 0))
    if len(node.output) > 1 and builder.graph.uses[node.output[1]]:
        raise ModelError(f"{told(node)} also outputs the positions of maxima, which is not supported")
    inside = bool(said.get("count_include_pad", 0))
    if pads[:axes] != pads[axes:] or any(2 * p > k for p, k in zip(pads[:axes], kernel, strict=True)):
        if not largest and not inside:
            raise ModelError(f"{told(node)} averages over unequally padded sides, which no layer of torch does")
        source = padded(builder, node, source, pads, float("-inf") if largest else 0.0)
        pads = [0] * 2 * axes
    if largest:
        kinds: dict[int, Any] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
        module = kinds[axes](kernel, stride, pads[:axes], dilation, ceil_mode=ceil)
    else:
        if any(d != 1 for d in dilation):
            raise ModelError(f"{told(node)} averages with dilation, which no layer of torch does")
        kinds = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
        module = kinds[axes](kernel, stride, pads[:axes], ceil, inside)
    builder.step(node.output[0], builder.plain_layer(node, module), source)


def global_pool(builder: Builder, node: Any) -> None:
    axes = builder.example(node.input[0]).dim() - 2
    average: dict[int, Any] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
    largest: dict[int, Any] = {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d}
    module = (average if node.op_type == "GlobalAveragePool" else largest)[axes](1)
    builder.step(node.output[0], builder.plain_layer(node, module), builder.value(node.input[0]))


def prelu(builder: Builder, node: Any) -> None:
    slope, given = builder.constant(node, 1), builder.example(node.input[0])
    if slope is None or slope.numel() not in (1, given.shape[1]):
        raise ModelError(f"{told(node)} has slopes other than one for each channel")
    if slope.numel() == 1:
        builder.step(node.output[0], F.leaky_relu, builder.value(node.input[0]), float(slope))
        return
    weights = {"weight": builder.weight(node, 1, slope.reshape(-1))}
    path = builder.layer(node, lambda: nn.PReLU(slope.numel()), weights)
    builder.step(node.output[0], path, builder.value(node.input[0]))


def matrix_product(builder: Builder, node: Any) -> None:
    builder.step(node.output[0], torch.matmul, *(builder.value(name) for name in node.input))
