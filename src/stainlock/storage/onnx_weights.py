"""The weights in an ONNX file: floats as they are, 8-bit ones dequantised.

An 8-bit tensor q represents scale·(q − zero point). Which scale and zero point belong to it is known from the operation
that reads it: DequantizeLinear, the QLinear operations, the Integer operations, whose outputs are multiplied by the
scale afterwards, and ONNX Runtime's own. Matrices are returned as stored and transposed, since files use both
orientations. Nothing is run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import FileError
from stainlock.storage.onnx_files import nodes_of, read_onnx, tensors_of
from stainlock.storage.values import shown
from stainlock.storage.weights import one_line

TURNED = " turned"  # suffix of the name of a transposed matrix
# For each operation, which inputs are the 8-bit weight, its scale and its zero point, and the axis of the scales.
_INPUTS = {
    "QLinearConv": (3, 4, 5, 0), "QLinearMatMul": (3, 4, 5, -1), "QGemm": (3, 4, 5, -1),
    "MatMulIntegerToFloat": (1, 3, 5, -1), "DynamicQuantizeMatMul": (1, 2, 3, -1), "QAttention": (1, 4, 7, -1),
    "MatMulInteger": (1, None, 3, -1), "ConvInteger": (1, None, 3, 0),
}  # fmt: skip
_NARROW = {"int8", "uint8", "int4", "uint4"}  # other integer types hold indices and sizes


@dataclass(frozen=True)
class _Scale:
    scale: str
    zero: str
    axis: int
    block: int = 0


def onnx_weights(path: str | Path) -> dict[str, Tensor]:
    """The weights in an ONNX file by name, as float32."""
    return weights_of(read_onnx(path), path)


def weights_of(model: Any, path: str | Path) -> dict[str, Tensor]:
    """The same for a model that was already read."""
    if model.graph.sparse_initializer:
        raise FileError(f"{path} keeps weights as sparse tensors, which are not read: save it with dense ones")
    arrays = _arrays(model, path)
    scales = _scales(model)
    found: dict[str, Tensor] = {}
    for name, array in arrays.items():
        kind = array.dtype.name
        if array.ndim < 2 or (np.issubdtype(array.dtype, np.integer) and kind not in _NARROW) or kind == "bool":
            continue
        try:
            # A copy, since the file's own bytes are read-only. float32 holds all values of 16-bit and narrower types.
            values = torch.from_numpy(array.astype(np.float32))
            if name in scales:
                values = _multiplied(values, arrays, scales[name])
        except (ValueError, TypeError, RuntimeError) as error:
            raise FileError(f"{path} has weights that can't be read, {shown(name)} ({one_line(error)})") from error
        found[name] = values
        if array.ndim == 2:
            found[name + TURNED] = values.T
    return found


def _arrays(model: Any, path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    helper: Any = importlib.import_module("onnx.numpy_helper")
    found: dict[str, np.ndarray[Any, Any]] = {}
    for given, tensor in tensors_of(model):
        name = given
        if tensor.data_type == tensor.STRING:
            continue
        while name in found:  # nested graphs may reuse a name
            name += "'"
        try:
            found[name] = helper.to_array(tensor)
        except Exception as error:  # the tensor's description may be wrong in any way
            raise FileError(f"{path} is damaged: {shown(name)} can't be read ({one_line(error)})") from error
    return found


def _multiplied(values: Tensor, arrays: Mapping[str, np.ndarray[Any, Any]], by: _Scale) -> Tensor:
    """scale·(values − zero point), with whichever of the two the file stores."""
    for name, apply in ((by.zero, torch.sub), (by.scale, torch.mul)):
        if name in arrays:
            values = apply(values, _spread(torch.from_numpy(arrays[name].astype(np.float32)), values, by))
    return values


def _spread(numbers: Tensor, values: Tensor, by: _Scale) -> Tensor:
    """Numbers shaped to broadcast: one for all values, one per slice along an axis, or one per block of slices."""
    if numbers.numel() == 1:
        return numbers.reshape(())
    axis = by.axis % values.dim()
    if by.block and numbers.dim() == values.dim():
        return numbers.repeat_interleave(min(by.block, values.shape[axis]), axis).narrow(axis, 0, values.shape[axis])
    return numbers.reshape([-1 if i == axis else 1 for i in range(values.dim())])


def _scales(model: Any) -> dict[str, _Scale]:
    """For each 8-bit tensor that an operation reads, the names of its scale and zero point."""
    nodes = list(nodes_of(model))
    behind: dict[str, list[Any]] = {}
    makers = {name: node for node in nodes for name in node.output}
    for node in nodes:
        for name in node.input:
            behind.setdefault(name, []).append(node)
    found: dict[str, _Scale] = {}
    for node in nodes:
        given = list(node.input)
        if node.op_type == "DequantizeLinear" and len(given) >= 2:
            found[given[0]] = _Scale(given[1], _input(given, 2), _attribute(node, "axis", 1),
                                     _attribute(node, "block_size", 0))  # fmt: skip
        elif node.op_type in _INPUTS:
            weight, scale, zero, axis = _INPUTS[node.op_type]
            if node.op_type == "QGemm" and _attribute(node, "transB", 0):
                axis = 0
            own = _multiplied_behind(node, behind, makers) if scale is None else _input(given, scale)
            if name := _input(given, weight):
                found[name] = _Scale(own, _input(given, zero), axis)
    return found


def _input(given: list[str], place: int) -> str:
    return given[place] if place < len(given) else ""


def _attribute(node: Any, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _multiplied_behind(node: Any, behind: Mapping[str, list[Any]], makers: Mapping[str, Any]) -> str:
    """The name of the weight's scale after an Integer operation: a Cast, then a Mul with the product of both scales.

    The one of the two that is stored is the weight's; the other is measured at every run.
    """
    for cast in (user for name in node.output for user in behind.get(name, [])):
        for product in (user for name in cast.output for user in behind.get(name, []) if user.op_type == "Mul"):
            for name in product.input:
                maker = makers.get(name)
                if maker is None:
                    return str(name)
                if maker.op_type == "Mul":
                    return next((str(own) for own in maker.input if own not in makers), "")
    return ""
