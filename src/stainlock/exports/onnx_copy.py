"""An ONNX file with new values in its stored tensors; names, operations and metadata stay as they were.

If several operations read a tensor and a plan changed it for only one of them, that one gets its own stored copy. A
changed value that the file used to compute from stored tensors is stored directly, except that 8-bit weights stay in
8 bits (`onnx_eight_bits`).
"""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stainlock.errors import FileError, ModelError
from stainlock.exports.onnx_eight_bits import Steps, steps_of
from stainlock.exports.onnx_file import run_onnx
from stainlock.exports.onnx_locked import write_onnx_locked
from stainlock.models.onnx_import.importing import closeness
from stainlock.models.onnx_import.network import OnnxNetwork, Origin, Source
from stainlock.storage.values import shown
from stainlock.storage.weights import one_line
from stainlock.target import Target, probe_inputs

Array = np.ndarray[Any, Any]
_WITH_A_THIRD_INPUT = ("Conv", "ConvTranspose", "Gemm")
_BIAS_PLACES = {"QLinearConv": 8, "QGemm": 6}  # of integer operations
_LARGEST = 2**31 - 1  # size limit of a protobuf message, in bytes


def write_onnx_copy(target: Target, path: Path) -> float:
    """Write the target's original ONNX file with the target's weights; return the largest output difference."""
    network = target.model
    if not isinstance(network, OnnxNetwork) or network.source is None:
        raise ModelError("expected a model that came from an ONNX file: use `export` to write others as ONNX")
    if target.insertions:
        return write_onnx_locked(target, network, network.source, path)
    onnx: Any = importlib.import_module("onnx")
    model = onnx.ModelProto()
    model.CopyFrom(network.source.graph.file)
    _write_values(model, network, network.source)
    if model.ByteSize() > _LARGEST:
        raise ModelError(f"the model has more than 2 GB, which one ONNX file can't hold: {model.ByteSize()} bytes")
    try:
        onnx.checker.check_model(model)
        onnx.save(model, str(path))
    except OSError as error:
        raise FileError(f"can't write {path.name} ({one_line(error)})") from error
    except Exception as error:  # onnx's own error, which says what is wrong
        raise ModelError(f"the edited file is not valid ONNX ({one_line(error)}): it was not kept") from error
    path.chmod(0o644)  # to be shipped, not a secret
    return _difference(target, network, path)


def _write_values(model: Any, network: OnnxNetwork, source: Source) -> None:
    state = network.state_dict()
    changed: dict[str, Array] = {}
    for name, origin in network.origins.items():
        if not origin.value:
            if bool(state[name].any()):
                weight = network.origins[f"{name.removesuffix('.bias')}.weight"].value
                _add_bias(model, weight, state[name].detach().cpu().numpy(), source, source.readers[name])
            continue
        values = _as_stored(state[name], origin, source)
        if not np.array_equal(values, source.values[origin.value]):
            changed[name] = values
    for name, values in changed.items():
        stored = network.origins[name].value
        others = [other for other, own in network.origins.items() if own.value == stored and other != name]
        if all(other in changed and np.array_equal(changed[other], values) for other in others):
            _replace(model, stored, values, steps_of(source, stored), integers=source.graph.has_integers)
        else:
            _store_anew(model, _unused(model, stored), values, source.readers.get(name, []))
    _attach_biases(model, source)


def _attach_biases(model: Any, source: Source) -> None:
    """Make integer operations that had no bias read the one that was stored for them."""
    stored = {tensor.name for tensor in model.graph.initializer}
    for name, output in source.graph.rewritten.biases.items():
        if name in stored:
            node = next(node for node in model.graph.node if output in node.output)
            place = _BIAS_PLACES[node.op_type]
            given = [*node.input, *[""] * (place + 1 - len(node.input))]
            given[place] = name
            del node.input[:]
            node.input.extend(given)


def _as_stored(values: torch.Tensor, origin: Origin, source: Source) -> Array:
    """A tensor of the module, in the shape and type that the file uses."""
    turned = (values.T if origin.turned else values).detach().cpu().contiguous()
    known = source.values[origin.value]
    return turned.numpy().reshape(known.shape).astype(known.dtype)


def _replace(model: Any, name: str, values: Array, steps: Steps | None, *, integers: bool) -> None:
    """Store new values: in the file's own steps if they are such, or if operations on ``integers`` need them to be."""
    helper: Any = importlib.import_module("onnx.numpy_helper")
    if steps is not None and (integers or np.array_equal(steps.values(steps.rounded(values)), values)):
        name, values = steps.name, steps.rounded(values)
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(helper.from_array(values, name))
            return
    for node in model.graph.node:
        if name in node.output:  # a constant, or computed from stored tensors: from now on it is stored
            if len([output for output in node.output if output]) == 1:
                model.graph.node.remove(node)
            else:
                place = list(node.output).index(name)
                node.output[place] = f"{name} before"
            break
    model.graph.initializer.append(helper.from_array(values, name))


def _store_anew(model: Any, name: str, values: Array, readers: list[tuple[str, int]]) -> None:
    helper: Any = importlib.import_module("onnx.numpy_helper")
    model.graph.initializer.append(helper.from_array(values, name))
    wanted = dict[str, list[int]]()
    for output, place in readers:
        wanted.setdefault(output, []).append(place)
    for node in model.graph.node:
        for place in wanted.get(node.output[0] if node.output else "", []):
            node.input[place] = name


def _unused(model: Any, name: str, first: str = "") -> str:
    """An unused name in the style of exporters, which does not reveal why the tensor is there."""
    taken = {"", *(tensor.name for tensor in model.graph.initializer)}
    taken |= {value for node in model.graph.node for value in (*node.input, *node.output)}
    candidates = (f"{name}_{number}" for number in itertools.count(1))
    return next(other for other in itertools.chain([first], candidates) if other not in taken)


def _add_bias(model: Any, stored: str, values: Array, source: Source, readers: list[tuple[str, int]]) -> None:
    """Add a bias to operations that have none: as their third input, or as an Add after them."""
    onnx: Any = importlib.import_module("onnx")
    stem = stored.removesuffix(".weight")
    name = _unused(model, stored, "" if stem == stored else f"{stem}.bias")
    model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    outputs = {output for output, _ in readers}
    for place, node in reversed(list(enumerate(model.graph.node))):
        if not node.output or node.output[0] not in outputs:
            continue
        outputs.remove(node.output[0])
        if node.op_type in _WITH_A_THIRD_INPUT:
            del node.input[2:]
            node.input.append(name)
            continue
        added, follows = name, place + 1
        convolves = source.graph.makers[node.output[0]].op_type == "Conv"
        made, node.output[0] = node.output[0], _unused(model, node.output[0])
        if convolves:  # in the file an integer product: the bias is turned to (1, C, 1, 1), as quantisers do
            sizes = np.array([1, -1, *[1] * (source.values[stored].ndim - 2)], np.int64)
            shape = _unused(model, f"{name}_reshape_shape")
            model.graph.initializer.append(onnx.numpy_helper.from_array(sizes, shape))
            added = _unused(model, f"{name}_reshape_output")
            model.graph.node.insert(follows, onnx.helper.make_node("Reshape", [name, shape], [added]))
            follows += 1
        model.graph.node.insert(follows, onnx.helper.make_node("Add", [node.output[0], added], [made]))
    if outputs:
        raise ModelError(f"{shown(min(outputs))} is the result of an integer operation without a bias, which a stain"
                         " needs: name another --site")  # fmt: skip


def _difference(target: Target, network: OnnxNetwork, path: Path) -> float:
    """The largest output difference between file and module on the same inputs; refuse a file whose outputs differ."""
    assert network.source is not None
    examples = target.normalise(probe_inputs(target, "exported"))
    examples = examples[: network.source.graph.batch or len(examples)]
    with torch.no_grad():
        expected = network(examples)
    images = examples.permute(0, 2, 3, 1).contiguous() if network.channels_last else examples
    found = run_onnx(path)(images)
    largest = size = 0.0
    for mine, theirs in zip(
        [expected] if isinstance(expected, torch.Tensor) else expected.values(), found, strict=True
    ):
        largest = max(largest, float((mine.double() - theirs.double()).abs().max()))
        size = max(size, float(mine.double().abs().max()))
    if not largest <= closeness(network) * size:
        raise ModelError(
            f"the edited file's outputs differ from the model's by up to {largest:.2g} (the largest output is"
            f" {size:.2g}): it was not kept"
        )
    return largest
