"""A locked model that came from an ONNX file: gates, reader and key schedule become operations of the new file.

The locked module is exported and compared like any other. Then its input and outputs get the names, sizes and layout of
the original file, and the new file gets the original's metadata.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from stainlock.errors import ModelError
from stainlock.exports.writing import write_export
from stainlock.models.onnx_import.graph import Graph
from stainlock.storage.weights import one_line
from stainlock.target import Target

_KEPT = ("producer_name", "producer_version", "domain", "model_version", "doc_string")


def write_onnx_locked(target: Target, original: Graph, path: Path, *, last: bool) -> float:
    """Write the locked model; return the largest difference between the file's outputs and the module's."""
    difference = write_export(target, path, "onnx").max_difference
    onnx: Any = importlib.import_module("onnx")
    model = onnx.load(str(path))
    (given,) = model.graph.input
    if last:
        _take_channels_last(model, given)
    names = {given.name: original.input}
    names |= {made.name: name for made, name in zip(model.graph.output, original.outputs, strict=True)}
    _rename(model, names)
    if original.batch is not None:
        for value in (*model.graph.input, *model.graph.output):
            for size in value.type.tensor_type.shape.dim:
                if size.HasField("dim_param"):
                    size.dim_value = original.batch
    for name in _KEPT:
        setattr(model, name, getattr(original.file, name))
    model.metadata_props.extend(original.file.metadata_props)
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # onnx's own error, which says what is wrong
        raise ModelError(f"the locked file is not valid ONNX ({one_line(error)}): it was not kept") from error
    onnx.save(model, str(path))
    path.chmod(0o644)
    return difference


def _take_channels_last(model: Any, given: Any) -> None:
    """Make the input (N, H, W, C), and transpose it for the network."""
    helper: Any = importlib.import_module("onnx.helper")
    inner = f"{given.name} turned"
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == given.name:
                node.input[place] = inner
    model.graph.node.insert(0, helper.make_node("Transpose", [given.name], [inner], perm=[0, 3, 1, 2]))
    sizes = list(given.type.tensor_type.shape.dim)
    turned = [type(sizes[axis]).FromString(sizes[axis].SerializeToString()) for axis in (0, 2, 3, 1)]
    del given.type.tensor_type.shape.dim[:]
    given.type.tensor_type.shape.dim.extend(turned)


def _rename(model: Any, names: dict[str, str]) -> None:
    """Rename values; a value that already has one of the new names is renamed too."""
    taken = set(names.values()) - set(names)
    own = {name for node in model.graph.node for name in (*node.input, *node.output)}
    names = names | {name: f"{name} inside" for name in taken & own}
    for node in model.graph.node:
        for values in (node.input, node.output):
            for place, name in enumerate(values):
                values[place] = names.get(name, name)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer):
        value.name = names.get(value.name, value.name)
