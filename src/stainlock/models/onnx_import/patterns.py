"""Operations that belong together: a matrix with its bias, and activations that older files write out.

    x·W + b                     MatMul, Add                       Linear
    x·sigmoid(x)                Sigmoid, Mul                      SiLU
    x·hardsigmoid(x)            HardSigmoid, Mul                  Hardswish
    x·(1 + erf(x/√2))/2         Div, Erf, Add, Mul, Mul           GELU

No other operation may read the values between them.
"""

from __future__ import annotations

import math
from typing import Any

from torch.nn import functional as F

from stainlock.models.onnx_import.building import Builder, Weights
from stainlock.models.onnx_import.graph import attributes
from stainlock.models.onnx_import.layers import linear


def fused(builder: Builder, node: Any) -> bool:
    """Build the operation and those after it as one, if they match a pattern; True if so."""
    if node.op_type == "MatMul":
        return _matrix(builder, node)
    if node.op_type in ("Sigmoid", "HardSigmoid"):
        return _gated(builder, node)
    if node.op_type in ("Div", "Mul"):
        return _error_function(builder, node)
    return False


def _matrix(builder: Builder, node: Any) -> bool:
    weight = builder.constant(node, 1)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or node.input[0] in builder.known:
        return False
    weights: Weights = {"weight": builder.weight(node, 1, weight.T, turned=True)}
    weights["bias"] = builder.no_bias(node, weight.shape[1], weight)
    after = builder.graph.only_reader(node.output[0])
    output = node.output[0]
    if after is not None and after.op_type == "Add":
        place = 1 - list(after.input).index(node.output[0])
        bias = builder.constant(after, place)
        if bias is not None and bias.shape == (weight.shape[1],):
            weights["bias"] = builder.weight(after, place, bias)
            builder.done.add(after.output[0])
            output = after.output[0]
    linear(builder, node, output, weights)
    return True


def _gated(builder: Builder, node: Any) -> bool:
    after = builder.graph.only_reader(node.output[0])
    if after is None or after.op_type != "Mul" or sorted(after.input) != sorted([node.input[0], node.output[0]]):
        return False
    if node.op_type == "HardSigmoid":
        said = attributes(node)
        if abs(said.get("alpha", 0.2) - 1 / 6) > 1e-6 or abs(said.get("beta", 0.5) - 0.5) > 1e-6:
            return False
    builder.done.add(after.output[0])
    function = F.silu if node.op_type == "Sigmoid" else F.hardswish
    builder.step(after.output[0], function, builder.value(node.input[0]))
    return True


def _error_function(builder: Builder, node: Any) -> bool:
    """x/√2 → erf → + 1 → times x, times one half, in either order."""
    scale, place = _factor(builder, node)
    expected = math.sqrt(2) if node.op_type == "Div" else math.sqrt(0.5)
    if scale is None or abs(scale - expected) > 1e-4 or (node.op_type == "Div" and place == 0):
        return False
    x = node.input[1 - place]
    erf = builder.graph.only_reader(node.output[0])
    if erf is None or erf.op_type != "Erf":
        return False
    plus = builder.graph.only_reader(erf.output[0])
    if plus is None or plus.op_type != "Add" or _factor(builder, plus)[0] != 1.0:
        return False
    first = builder.graph.only_reader(plus.output[0])
    if first is None or first.op_type != "Mul":
        return False
    other = next(name for name in first.input if name != plus.output[0])
    parts = [erf, plus, first]
    if other == x:
        second = builder.graph.only_reader(first.output[0])
        if second is None or second.op_type != "Mul" or _factor(builder, second)[0] != 0.5:
            return False
        parts.append(second)
    else:
        half = builder.graph.makers.get(other)
        if half is None or half.op_type != "Mul" or x not in half.input or _factor(builder, half)[0] != 0.5:
            return False
        if builder.graph.uses[other] == 1:
            parts.insert(0, half)
    builder.done |= {part.output[0] for part in parts}
    builder.step(parts[-1].output[0], F.gelu, builder.value(x))
    return True


def _factor(builder: Builder, node: Any) -> tuple[float | None, int]:
    """The single constant that an operation combines with its other input, and its place."""
    for place in (0, 1):
        constant = builder.constant(node, place)
        if constant is not None and constant.numel() == 1:
            return float(constant), place
    return None, 0
