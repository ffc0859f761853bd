"""ONNX files, with weights in floats and in 8 bits, spoiled as messages: other numbers, names, types and sizes."""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from stainlock.models.onnx_import.importing import onnx_target
from stainlock.storage.onnx_weights import onnx_weights

onnx: Any = importlib.import_module("onnx") if find_spec("onnx") else None  # else its formats are left out
_NUMBERS = (-1, 0, 1, 2, 3, 7, 2**20, 2**31 - 1)
_TEXTS = ("", "x", "w", "../x", "/etc/passwd", "location", "data.bin", "a" * 400, "\n")


@functools.cache
def examples() -> list[bytes]:
    return [model.SerializeToString() for model in (_floats(), _eight_bit(), _integers())]


def _model(nodes: list[Any], tensors: dict[str, np.ndarray[Any, Any]], shape: list[int]) -> Any:
    given = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", *shape])
    made = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 8])
    stored = [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = onnx.helper.make_graph(nodes, "g", [given], [made], stored)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def _floats() -> Any:
    random = np.random.default_rng(0)
    make = onnx.helper.make_node
    nodes = [make("Conv", ["x", "w", "b"], ["c"], kernel_shape=[3, 3]), make("Relu", ["c"], ["r"]),
             make("Flatten", ["r"], ["f"]), make("Gemm", ["f", "v", "a"], ["y"])]  # fmt: skip
    shapes = {"w": (4, 3, 3, 3), "b": (4,), "v": (64, 8), "a": (8,)}
    return _model(nodes, {n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()}, [3, 6, 6])


def _eight_bit() -> Any:
    whole = np.arange(256, dtype=np.int8).reshape(32, 8)
    nodes = [onnx.helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=1),
             onnx.helper.make_node("MatMul", ["x", "d"], ["y"])]  # fmt: skip
    return _model(nodes, {"w": whole, "s": np.full(8, 0.1, np.float32), "z": np.zeros(8, np.int8)}, [32])


def _integers() -> Any:
    """A convolution and a matrix as integer operations, and a product of a map rounded while it runs."""
    make = onnx.helper.make_node
    random = np.random.default_rng(0)
    nodes = [
        make("QuantizeLinear", ["x", "s", "z"], ["q"]),
        make("QLinearConv", ["q", "s", "z", "w", "sw", "zw", "s", "z", "b"], ["c"], kernel_shape=[3, 3]),
        make("MaxPool", ["c"], ["p"], kernel_shape=[4, 4]),
        make("Flatten", ["p"], ["f"]),
        make("QLinearMatMul", ["f", "s", "z", "v", "sw", "zw", "s", "z"], ["m"]),
        make("DequantizeLinear", ["m", "s", "z"], ["d"]),
        make("DynamicQuantizeLinear", ["d"], ["e", "g", "h"]),
        make("MatMulInteger", ["e", "u", "h", "zw"], ["i"]),
        make("Cast", ["i"], ["j"], to=1),
        make("Mul", ["g", "sw"], ["k"]),
        make("Mul", ["j", "k"], ["y"]),
    ]
    tensors = {name: random.integers(-127, 128, shape, np.int8)
               for name, shape in {"w": (4, 3, 3, 3), "v": (4, 6), "u": (6, 8)}.items()}  # fmt: skip
    scales = {"s": np.float32(0.05), "z": np.uint8(128), "sw": np.float32(0.01), "zw": np.int8(0)}
    return _model(nodes, tensors | scales | {"b": np.arange(4, dtype=np.int32)}, [3, 6, 6])


def spoil(content: bytes, random: Random) -> bytes:
    model = onnx.ModelProto.FromString(content)
    for _ in range(random.randint(1, 3)):
        _change(model, random, 0)
    return bytes(model.SerializeToString())


def _change(message: Any, random: Random, depth: int) -> None:
    """Go down into the message, and change, repeat or take away one thing in it."""
    fields = message.ListFields()
    if not fields:
        return
    field, value = random.choice(fields)
    types = type(field)
    several = hasattr(value, "append") and not isinstance(value, bytes | str)
    nested = field.type == types.TYPE_MESSAGE
    if nested and random.randint(0, 4):
        _change(random.choice(list(value)) if several else value, random, depth + 1)
    elif several and random.randint(0, 1):
        del value[random.randrange(len(value))]
    elif several and nested:
        value.add().CopyFrom(random.choice(list(value)[:-1] or list(value)))
    elif several:
        value.append(_other(field, random))
    elif nested or not random.randint(0, 2):
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _other(field, random))


def _other(field: Any, random: Random) -> Any:
    types = type(field)
    if field.type == types.TYPE_STRING:
        return random.choice(_TEXTS)
    if field.type == types.TYPE_BYTES:
        return random.randbytes(random.choice([0, 1, 16, 256]))
    if field.type in (types.TYPE_FLOAT, types.TYPE_DOUBLE):
        return random.choice([0.0, -1.0, 1e30, float("nan"), float("inf")])
    if field.type == types.TYPE_ENUM:
        return random.choice(list(field.enum_type.values_by_number))
    return random.choice(_NUMBERS)


def use_weights(path: Path) -> None:
    for tensor in onnx_weights(path).values():
        tensor.float().sum().item()


def use_model(path: Path) -> None:
    onnx_target(path)
