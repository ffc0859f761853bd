"""The values of a graph that do not depend on the pixels: weights, constants and sizes.

Exporters write sizes as operations (Shape, Gather, Concat, …). Instead of importing these, ONNX Runtime computes their
values with 1, 2 and 3 images: a value that stays the same is a constant, and a whole number that grows linearly with
the number N of images is a + b·N. Anything else stays an operation.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from stainlock.errors import ModelError
from stainlock.models.onnx_import.graph import Array, Graph
from stainlock.models.onnx_import.network import Size
from stainlock.storage.onnx_files import open_session
from stainlock.storage.weights import one_line

_OF_SHAPES = {"Shape", "Size"}
_LONGEST = 64  # most entries in a list of sizes


class Known:
    """Constants by name, and lists of sizes (or single ones) that depend on the number of images."""

    def __init__(self, constants: dict[str, Array], sizes: dict[str, list[int | Size]], scalars: set[str]) -> None:
        self.constants, self.sizes, self.scalars = constants, sizes, scalars

    def __contains__(self, name: str) -> bool:
        return name in self.constants or name in self.sizes

    def numbers(self, name: str) -> list[int | Size] | None:
        """Whole numbers, as an operation takes them for sizes and indices; None if they depend on the pixels."""
        if name in self.sizes:
            return self.sizes[name]
        if name in self.constants:
            return [int(n) for n in self.constants[name].reshape(-1)]
        return None


def known_values(graph: Graph) -> Known:
    """Every value that does not depend on pixels and is a constant or a size."""
    fixed = _independent(graph)
    wanted = [name for name in fixed if name not in graph.stored]
    runs = _runs(graph, wanted) if wanted else []
    constants, sizes, scalars = dict(graph.stored), {}, set()
    for place, name in enumerate(wanted):
        values = [run[place] for run in runs]
        if all(np.array_equal(values[0], other) for other in values[1:]):
            constants[name] = values[0]
        elif (found := _even(values)) is not None:
            sizes[name] = found
            if values[0].ndim == 0:
                scalars.add(name)
    return Known(constants, sizes, scalars)


def _independent(graph: Graph) -> list[str]:
    """Values computed from stored tensors and from shapes of other values."""
    fixed = dict.fromkeys(graph.stored)
    for node in graph.nodes:
        if node.op_type in _OF_SHAPES or all(name in fixed or not name for name in node.input):
            fixed |= dict.fromkeys(name for name in node.output if name)
    return list(fixed)


def _runs(graph: Graph, wanted: list[str]) -> list[list[Array]]:
    onnx: Any = importlib.import_module("onnx")
    model = onnx.ModelProto()
    model.CopyFrom(graph.model)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    kind = np.float16 if _input_type(graph) == onnx.TensorProto.FLOAT16 else np.float32
    try:
        session = open_session(model.SerializeToString())
        batches = [graph.batch] if graph.batch is not None else [1, 2, 3]
        return [session.run(None, {graph.input: np.zeros((n, *graph.shape), kind)}) for n in batches]
    except Exception as error:  # onnxruntime has no common base class for its errors
        shape = "×".join(map(str, graph.shape))
        raise ModelError(f"ONNX Runtime can't run {graph.path} on inputs of {shape} ({one_line(error)}): set"
                         " --input-size if the file leaves it open")  from error  # fmt: skip


def _input_type(graph: Graph) -> int:
    return next(int(v.type.tensor_type.elem_type) for v in graph.model.graph.input if v.name == graph.input)


def _even(values: list[Array]) -> list[int | Size] | None:
    """a + b·N for every entry, from its values for N = 1, 2, 3."""
    first, second, third = values
    whole = first.dtype.kind == "i" and first.ndim <= 1 and first.shape == second.shape == third.shape
    if not whole or first.size > _LONGEST or not np.array_equal(third - second, second - first):
        return None
    pairs = zip(first.reshape(-1).tolist(), (second - first).reshape(-1).tolist(), strict=True)
    return [Size(start - step, step) if step else start for start, step in pairs]
