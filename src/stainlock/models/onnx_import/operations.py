"""Every ONNX operation with a counterpart in torch: one row each, for all opsets from `graph.OLDEST` on.

A row builds the steps of one operation. Operations that do not depend on pixels never get here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.errors import ModelError
from stainlock.models.onnx_import import eight_bits, layers, shapes
from stainlock.models.onnx_import.building import Builder
from stainlock.models.onnx_import.graph import attributes, told
from stainlock.models.onnx_import.network import Value

Row = Callable[[Builder, Any], None]


def _function(call: Callable[..., Any], *more: Any) -> Row:
    """A function of all inputs, in their order."""

    def build(builder: Builder, node: Any) -> None:
        builder.step(node.output[0], call, *(builder.value(name) for name in node.input if name), *more)

    return build


def _with(call: Callable[..., Any], **defaults: Any) -> Row:
    """A function of one input, with attributes as positional arguments."""

    def build(builder: Builder, node: Any) -> None:
        said = attributes(node)
        more = [said.get(name, default) for name, default in defaults.items()]
        builder.step(node.output[0], call, builder.value(node.input[0]), *more)

    return build


def _folded(call: Callable[[Any, Any], Any]) -> Row:
    """Any number of inputs, combined two at a time."""

    def build(builder: Builder, node: Any) -> None:
        if len(node.input) == 1:
            builder.step(node.output[0], _same, builder.value(node.input[0]))
        first: Any = builder.value(node.input[0])
        for place, name in enumerate(node.input[1:], 1):
            last = place == len(node.input) - 1
            output = node.output[0] if last else f"{node.output[0]} {place}"
            builder.step(output, call, first, builder.value(name))
            first = Value(output)

    return build


def _same(x: Tensor) -> Tensor:
    return x.contiguous()


def _clip(builder: Builder, node: Any) -> None:
    said, source = attributes(node), builder.value(node.input[0])
    ends = []
    for place, name in ((1, "min"), (2, "max")):
        constant = builder.constant(node, place)
        if builder.has(node, place) and constant is None:
            raise ModelError(f"{told(node)} clips at a bound that depends on the image")
        ends.append(float(constant) if constant is not None else said.get(name))
    low, high = (None if end is None or abs(end) > 1e30 else end for end in ends)
    if (low, high) == (0.0, 6.0):
        builder.step(node.output[0], F.relu6, source)
    elif (low, high) == (0.0, None):
        builder.step(node.output[0], F.relu, source)
    else:
        builder.step(node.output[0], torch.clamp, source, low, high)


def _hard_sigmoid(builder: Builder, node: Any) -> None:
    said = attributes(node)
    alpha, beta, source = said.get("alpha", 0.2), said.get("beta", 0.5), builder.value(node.input[0])
    if abs(alpha - 1 / 6) < 1e-6 and abs(beta - 0.5) < 1e-6:
        builder.step(node.output[0], F.hardsigmoid, source)
    else:
        builder.step(node.output[0], _sloped, source, alpha, beta)


def _sloped(x: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


def _selu(builder: Builder, node: Any) -> None:
    if attributes(node):
        raise ModelError(f"{told(node)} has constants of its own, expected the usual ones")
    builder.step(node.output[0], F.selu, builder.value(node.input[0]))


def _gelu(builder: Builder, node: Any) -> None:
    source = builder.value(node.input[0])
    if attributes(node).get("approximate", "none") == "tanh":
        builder.step(node.output[0], _tanh_gelu, source)
    else:
        builder.step(node.output[0], F.gelu, source)


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _softmax(builder: Builder, node: Any) -> None:
    given = builder.example(node.input[0])
    old = builder.graph.opset < 13  # all axes from the given one on count as one
    axis = attributes(node).get("axis", 1 if old else -1) % given.dim()
    call = F.softmax if node.op_type == "Softmax" else F.log_softmax
    if old and axis != given.dim() - 1 and math.prod(given.shape[axis + 1 :]) != 1:
        builder.step(node.output[0], _flat_softmax, builder.value(node.input[0]), call, axis)
    else:
        builder.step(node.output[0], call, builder.value(node.input[0]), axis)


def _flat_softmax(x: Tensor, call: Callable[..., Tensor], axis: int) -> Tensor:
    return call(x.flatten(axis), axis).reshape(x.shape)


def _divide(builder: Builder, node: Any) -> None:
    whole = not builder.example(node.input[0]).is_floating_point()
    call = operator.floordiv if whole else operator.truediv
    builder.step(node.output[0], call, *(builder.value(name) for name in node.input))


def _reduce(call: Callable[..., Any]) -> Row:
    def build(builder: Builder, node: Any) -> None:
        said, source = attributes(node), builder.value(node.input[0])
        axes = builder.numbers(node, 1, "axes")
        rank, keep = builder.example(node.input[0]).dim(), bool(said.get("keepdims", 1))
        if not axes:
            if said.get("noop_with_empty_axes", 0):
                builder.step(node.output[0], _same, source)
                return
            axes = list(range(rank))
        places = sorted(axis % rank for axis in axes)
        if 0 in places:
            raise ModelError(f"{told(node)} reduces over the images of a batch")
        builder.step(node.output[0], call, source, places, keep)

    return build


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.mean(x, axes, keep)


def _root_of_squares(x: Tensor, axes: list[int], keep: bool) -> Any:
    return torch.linalg.vector_norm(x, 2, axes, keep)


def _squares(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(x * x, axes, keep)


def _einsum(builder: Builder, node: Any) -> None:
    equation = attributes(node)["equation"]
    builder.step(node.output[0], torch.einsum, equation, *(builder.value(name) for name in node.input))


OPERATIONS: dict[str, Row] = {
    # Layers
    "Conv": layers.convolution, "ConvTranspose": layers.convolution, "Gemm": layers.gemm,
    "MatMul": layers.matrix_product, "BatchNormalization": layers.batch_norm, "LayerNormalization": layers.layer_norm,
    "GroupNormalization": layers.group_norm, "InstanceNormalization": layers.instance_norm, "PRelu": layers.prelu,
    "MaxPool": layers.pool, "AveragePool": layers.pool,
    "GlobalAveragePool": layers.global_pool, "GlobalMaxPool": layers.global_pool,
    # Activations
    "Relu": _function(F.relu), "LeakyRelu": _with(F.leaky_relu, alpha=0.01), "Sigmoid": _function(torch.sigmoid),
    "Tanh": _function(torch.tanh), "Elu": _with(F.elu, alpha=1.0), "Celu": _with(F.celu, alpha=1.0), "Selu": _selu,
    "Softplus": _function(F.softplus), "HardSigmoid": _hard_sigmoid, "HardSwish": _function(F.hardswish),
    "Mish": _function(F.mish), "Gelu": _gelu, "Clip": _clip, "Softmax": _softmax, "LogSoftmax": _softmax,
    # Arithmetic
    "Add": _function(operator.add), "Sub": _function(operator.sub), "Mul": _function(operator.mul), "Div": _divide,
    "Pow": _function(torch.pow), "Sqrt": _function(torch.sqrt), "Erf": _function(torch.erf),
    "Exp": _function(torch.exp), "Log": _function(torch.log), "Abs": _function(torch.abs),
    "Neg": _function(operator.neg), "Reciprocal": _function(torch.reciprocal), "Floor": _function(torch.floor),
    "Ceil": _function(torch.ceil), "Round": _function(torch.round), "Sin": _function(torch.sin),
    "Cos": _function(torch.cos), "Sum": _folded(operator.add), "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum), "Equal": _function(operator.eq), "Greater": _function(operator.gt),
    "Less": _function(operator.lt), "GreaterOrEqual": _function(operator.ge), "LessOrEqual": _function(operator.le),
    "Not": _function(torch.logical_not), "And": _function(torch.logical_and), "Or": _function(torch.logical_or),
    "Where": _function(torch.where), "Einsum": _einsum,
    # Reductions
    "ReduceMean": _reduce(_mean), "ReduceSum": _reduce(torch.sum), "ReduceMax": _reduce(torch.amax),
    "ReduceMin": _reduce(torch.amin), "ReduceL2": _reduce(_root_of_squares), "ReduceSumSquare": _reduce(_squares),
    # 8 bits
    "QuantizeLinear": eight_bits.quantise, "DequantizeLinear": eight_bits.dequantise,
    # Shapes
    "Reshape": shapes.reshape, "Flatten": shapes.flatten, "Transpose": shapes.transpose, "Squeeze": shapes.squeeze,
    "Unsqueeze": shapes.unsqueeze, "Concat": shapes.concat, "Split": shapes.split, "Slice": shapes.slice_,
    "Gather": shapes.gather, "Range": shapes.range_, "Expand": shapes.expand, "Tile": shapes.tile, "Pad": shapes.pad,
    "Resize": shapes.resize, "DepthToSpace": shapes.depth_to_space, "Cast": shapes.cast,
    "Identity": _function(_same), "Dropout": lambda b, n: b.step(n.output[0], _same, b.value(n.input[0])),
}  # fmt: skip
