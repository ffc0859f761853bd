"""A locked model that came from an ONNX file: gates, reader and key schedule become operations of the new file.

The locked module is exported and compared like any other. Maps that the original rounds to 8 bits are rounded here too,
and weights that it stores in 8 bits are stored in the same steps, by QuantizeLinear and DequantizeLinear; gates come
between these and the layers. Then the input and outputs get the names, sizes and layout of the original file, and the
new file gets the original's metadata.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.exports.onnx_eight_bits import steps_of
from stainlock.exports.writing import CLOSE, write_export
from stainlock.models.onnx_import.network import OnnxNetwork, Source
from stainlock.storage.weights import one_line
from stainlock.target import Target

# Largest difference from the module's outputs, relative to the largest, if maps are rounded to 8 bits: a sum in another
# order may be rounded to the next step, in every layer. A wrong file differs by as much as its outputs do.
_ROUNDED = 0.1
_KEPT = ("producer_name", "producer_version", "domain", "model_version", "doc_string")


def write_onnx_locked(target: Target, network: OnnxNetwork, source: Source, path: Path) -> float:
    """Write the locked model; return the largest difference between the file's outputs and the module's."""
    original = source.graph
    close = _ROUNDED if source.rounds else CLOSE
    found = write_export(_with_operations(target), path, "onnx", close=close)
    if original.batch is None and not found.any_batch:
        raise ModelError(f"{original.path} can't be written for any number of images: lock a file with a fixed batch")
    onnx: Any = importlib.import_module("onnx")
    model = onnx.load(str(path))
    _store_steps(model, network, source)
    (given,) = model.graph.input
    if network.channels_last:
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
    return found.max_difference


def _with_operations(target: Target) -> Target:
    """A copy that rounds maps by two operations, which PyTorch exports as QuantizeLinear and DequantizeLinear."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers the operations
    target = target.copy()
    network: Any = target.model
    rounding = torch.fake_quantize_per_tensor_affine
    network.steps = [replace(s, call=_rounded) if s.call is rounding else s for s in network.steps]
    return target


def _rounded(x: Tensor, scale: float, zero: int, low: int, high: int) -> Tensor:
    library: Any = torch.ops.quantized_decomposed
    given = scale, zero, low, high, torch.uint8 if low == 0 else torch.int8
    result: Tensor = library.dequantize_per_tensor(library.quantize_per_tensor(x, *given), *given)
    return result


def _store_steps(model: Any, network: OnnxNetwork, source: Source) -> None:
    """Store weights in 8 bits again where the original does: the lock only moved them, so they are still its steps."""
    onnx: Any = importlib.import_module("onnx")
    array: Any = onnx.numpy_helper.from_array
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, origin in network.origins.items():
        steps = steps_of(source, origin.value) if origin.value else None
        if steps is None or name not in stored:
            continue
        values = onnx.numpy_helper.to_array(stored[name])
        given = values.T if origin.turned else values
        rounded = steps.rounded(given) if given.shape == steps.stored.shape else None
        if rounded is None or not np.array_equal(steps.values(rounded), given):
            continue
        model.graph.initializer.remove(stored[name])
        zero = np.broadcast_to(steps.zero, steps.scale.shape).astype(rounded.dtype)
        own = {"quantized": rounded, "scale": steps.scale, "zero_point": zero}
        if origin.turned:
            own = {end: numbers.T for end, numbers in own.items()}
        axis = {"axis": int(np.argmax(own["scale"].shape))} if steps.scale.ndim else {}
        for end, numbers in own.items():
            flat = numbers.reshape(-1) if end != "quantized" and steps.scale.ndim else numbers
            model.graph.initializer.append(array(flat.copy(), f"{name}_{end}"))
        inputs = [f"{name}_{end}" for end in own]
        model.graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", inputs, [name], **axis))


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
