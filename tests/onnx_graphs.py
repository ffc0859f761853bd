"""Small ONNX files made by hand, as exporters of many kinds write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

Arrays = dict[str, "np.ndarray[Any, Any]"]


def node(kind: str, given: str, made: str, **settings: Any) -> Any:
    """An operation; names with blanks between them, "-" for one that is left out."""
    names = ["" if name == "-" else name for name in given.split()]
    return onnx.helper.make_node(kind, names, made.split(), name=f"{kind}_{made.split()[0]}", **settings)


def numbers(*shape: int, seed: int = 0, scale: float = 0.3) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def whole(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def save(
    path: Path,
    nodes: list[Any],
    stored: Arrays,
    shape: tuple[Any, ...] = ("n", 3, 12, 12),
    *,
    outputs: tuple[str, ...] = ("y",),
    opset: int = 17,
    kind: int = 1,
    rank: int = 2,
) -> Path:
    given = onnx.helper.make_tensor_value_info("x", kind, shape)
    sizes = [f"size{i}" for i in range(rank)] if rank else None
    made = [onnx.helper.make_tensor_value_info(name, kind, sizes) for name in outputs]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = onnx.helper.make_graph(nodes, "g", [given], made, tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)
    model.producer_name = "another tool"
    onnx.helper.set_model_props(model, {"classes": "ten"})
    onnx.save(model, str(path))
    return path


def classifier(path: Path, *, batch: int | str = "n", channels_last: bool = False) -> Path:
    """Two convolutions with ReLUs and a matrix. The first has a bias, the second none, as exporters leave out zeros."""
    nodes = [
        node("Conv", "x w1 b1", "c1", pads=[1, 1, 1, 1]), node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2", strides=[2, 2]), node("Relu", "c2", "r2"),
        node("GlobalAveragePool", "r2", "p"), node("Flatten", "p", "f"),
        node("Gemm", "f fc.weight fc.bias", "y", transB=1),
    ]  # fmt: skip
    stored = {"w1": numbers(24, 3, 3, 3), "b1": numbers(24, seed=1), "w2": numbers(32, 24, 3, 3, seed=2),
              "fc.weight": numbers(10, 32, seed=3, scale=1.0), "fc.bias": numbers(10, seed=4)}  # fmt: skip
    shape: tuple[Any, ...] = (batch, 3, 32, 32)
    if channels_last:
        nodes[0].input[0] = "turned"
        nodes.insert(0, node("Transpose", "x", "turned", perm=[0, 3, 1, 2]))
        shape = (batch, 32, 32, 3)
    return save(path, nodes, stored, shape)
