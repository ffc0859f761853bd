"""An ONNX file to be imported as a module: one input, operations of a known version, no control flow."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stainlock.errors import ModelError
from stainlock.models.onnx_import.integers import Rewritten, in_floats
from stainlock.storage.onnx_files import read_onnx
from stainlock.storage.values import shown
from stainlock.storage.weights import one_line

Array = np.ndarray[Any, Any]
OLDEST = 11  # the first opset whose operations mean what they mean today
_CONTROL = {"If", "Loop", "Scan", "SequenceMap"}
_SIDE = 224  # rows and columns if the file leaves them open and the user does not give them
_WIDEST = 2**14
_DEFAULT = ("", "ai.onnx")


@dataclass(frozen=True)
class Graph:
    """The file's operations in order, its stored tensors, its input and its outputs.

    ``model`` is what is followed: the ``file``'s own, or that with its integer operations rewritten.
    """

    path: Path
    file: Any
    rewritten: Rewritten
    opset: int
    input: str
    shape: tuple[int, ...]  # of one image
    batch: int | None  # None if any number of images may be given at once
    outputs: tuple[str, ...]
    stored: dict[str, Array] = field(repr=False)

    @property
    def model(self) -> Any:
        return self.rewritten.model

    @property
    def has_integers(self) -> bool:
        """Whether operations of the file compute with integers."""
        return self.model is not self.file

    @property
    def nodes(self) -> list[Any]:
        return list(self.model.graph.node)

    @cached_property
    def uses(self) -> Counter[str]:
        """How often each value is read, by operations and as an output."""
        return Counter([name for node in self.nodes for name in node.input] + list(self.outputs))

    @cached_property
    def makers(self) -> dict[str, Any]:
        return {name: node for node in self.nodes for name in node.output}

    @cached_property
    def readers(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for node in self.nodes:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found

    def only_reader(self, name: str) -> Any:
        """The only operation that reads a value, if there is exactly one."""
        return self.readers[name][0] if self.uses[name] == 1 and name in self.readers else None


def attributes(node: Any) -> dict[str, Any]:
    helper: Any = importlib.import_module("onnx.helper")
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def told(node: Any) -> str:
    """An operation as it is named in error messages."""
    return f"{shown(node.op_type)} {shown(node.name)}" if node.name else shown(node.op_type)


def read_graph(path: str | Path, input_shape: tuple[int, ...] | None = None) -> Graph:
    """Read and check a file; ``input_shape`` sets sizes that it leaves open."""
    path = Path(path)
    model = read_onnx(path)
    if model.functions:
        inliner: Any = importlib.import_module("onnx.inliner")
        model = inliner.inline_local_functions(model)
    opset = max((int(o.version) for o in model.opset_import if o.domain in _DEFAULT), default=0)
    newest = int(importlib.import_module("onnx.defs").onnx_opset_version())
    if not OLDEST <= opset <= newest:
        advice = "onnx.version_converter.convert_version(model, 17) converts it, or export it again with a newer opset"
        raise ModelError(f"{path} has operations of opset {opset}, expected {OLDEST} to {newest}: "
                         + (advice if opset < OLDEST else "update onnx"))  # fmt: skip
    for node in model.graph.node:
        if node.op_type in _CONTROL:
            raise ModelError(
                f"{path} has control flow ({told(node)}), which depends on the values and can't be followed:"
                " export the model without it; `verify` by weights reads it as it is"
            )
    file, rewritten = model, in_floats(model)
    model = rewritten.model
    stored = _stored(model, path)
    given = [value for value in model.graph.input if value.name not in stored]
    if len(given) != 1:
        names = ", ".join(shown(value.name) for value in given) or "none"
        raise ModelError(f"expected one input, the images, in {path}, got {names}")
    shape, batch = _input_shape(given[0], path, input_shape)
    outputs = tuple(value.name for value in model.graph.output)
    if not outputs or len(set(outputs)) != len(outputs):
        raise ModelError(
            f"expected outputs of different names in {path}, got {', '.join(map(shown, outputs)) or 'none'}"
        )
    return Graph(path, file, rewritten, opset, given[0].name, shape, batch, outputs, stored)


def _stored(model: Any, path: Path) -> dict[str, Array]:
    helper: Any = importlib.import_module("onnx.numpy_helper")
    found: dict[str, Array] = {}
    try:
        for tensor in model.graph.initializer:
            found[tensor.name] = helper.to_array(tensor)
        for node in model.graph.node:
            if node.op_type == "Constant" and len(node.output) == 1:
                found[node.output[0]] = _constant(node, helper)
    except Exception as error:  # a damaged tensor can raise anything
        raise ModelError(f"{path} is damaged: a stored tensor can't be read ({one_line(error)})") from error
    return found


def _constant(node: Any, helper: Any) -> Array:
    (given,) = node.attribute
    if given.name == "value":
        return helper.to_array(given.t)  # type: ignore[no-any-return]
    value = attributes(node)[given.name]
    kinds = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    return np.asarray(value, kinds[given.name])


def _input_shape(given: Any, path: Path, said: tuple[int, ...] | None) -> tuple[tuple[int, ...], int | None]:
    tensor = given.type.tensor_type
    if tensor.elem_type not in (1, 10):  # float, float16
        raise ModelError(f"expected images in floats as {shown(given.name)} of {path}, got whole numbers: export the"
                         " network itself, without the conversion of its input")  # fmt: skip
    sizes = [int(d.dim_value) if d.HasField("dim_value") and d.dim_value > 0 else None for d in tensor.shape.dim]
    if not 2 <= len(sizes) <= 4:
        raise ModelError(f"expected images (N, C, H, W) or vectors as input of {path}, got {len(sizes)} dimensions")
    batch, *rest = sizes
    channels = said[0] if said and len(said) == len(rest) else 3
    usual = (channels, *(said[-2:] if said and len(said) >= 2 else (_SIDE, _SIDE))) if len(rest) == 3 else said or ()
    if None in rest and len(usual) != len(rest):
        raise ModelError(f"{path} leaves the size of its input open: set --input-size")
    shape = tuple(fixed if fixed is not None else int(usual[i]) for i, fixed in enumerate(rest))
    if max(shape) > _WIDEST:
        raise ModelError(f"{path} takes inputs of {'×'.join(map(str, shape))}, larger than any image")
    return shape, batch
