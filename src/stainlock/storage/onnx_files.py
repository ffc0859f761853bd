"""ONNX files that may come from a stranger: nothing in them is run, and only files in the same folder are read.

An ONNX file may store its tensors in other files (external data). Such a file must be in the folder of the ONNX file
and contain the bytes that are asked for.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from stainlock.errors import FileError, ModelError
from stainlock.storage.files import MOST_TENSORS
from stainlock.storage.values import shown
from stainlock.storage.weights import TIED, one_line

SUFFIX = ".onnx"
_MOST_NODES = 1_000_000
_DEEPEST = 16  # levels of nested graphs


def is_onnx(path: str | Path) -> bool:
    """Whether a name has the suffix of ONNX files."""
    return Path(path).suffix.lower() == SUFFIX


def check_onnx_installed() -> None:
    if find_spec("onnx") is None:
        raise ModelError("ONNX files need onnx: pip install stainlock[onnx]")


def read_onnx(path: str | Path) -> Any:
    """The file as onnx's own `ModelProto`, with external data from its folder."""
    path = Path(path)
    if not path.is_file():
        raise FileError(f"{path} does not exist" if not path.exists() else f"expected an ONNX file, got {path}")
    check_onnx_installed()
    onnx: Any = importlib.import_module("onnx")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf and onnx have no common base class for their errors
        raise FileError(f"{path} can't be read as ONNX ({one_line(error)}): get it again") from error
    if not model.graph.node or not model.opset_import:
        raise FileError(f"{path} is not an ONNX model: it has no operations, or does not say their opset version")
    if len(model.graph.initializer) > MOST_TENSORS or len(model.graph.node) > _MOST_NODES:
        raise FileError(f"{path} has more tensors or operations than any model: {len(model.graph.initializer)} and"
                        f" {len(model.graph.node)}")  # fmt: skip
    _load_external(model, path)
    return model


def open_session(model: bytes | str) -> Any:
    """An ONNX Runtime session for a model or a file, with as many threads as torch uses. What ONNX Runtime prints about
    an unreadable file is hidden, since it also raises an error."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    with contextlib.redirect_stdout(io.StringIO()):
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _load_external(model: Any, path: Path) -> None:
    helper: Any = importlib.import_module("onnx.external_data_helper")
    outside = [tensor for _, tensor in tensors_of(model) if tensor.data_location == tensor.EXTERNAL]
    asked, files = 0, {path.resolve(): path.stat().st_size}
    for tensor in outside:
        facts = {entry.key: entry.value for entry in tensor.external_data}
        location = facts.get("location", "")
        place = _place(path, location)
        if place is None:
            raise FileError(f"{path} stores {shown(tensor.name)} in {shown(location)}, which is not in its folder: such"
                            " files are not read; save the model with its data in one folder or file")  # fmt: skip
        if not place.is_file():
            raise FileError(f"{path} stores {shown(tensor.name)} in {shown(location)}, which is missing: get it too")
        files[place] = place.stat().st_size
        try:
            start = int(facts.get("offset", 0))
            length = int(facts.get("length", files[place] - start))
        except ValueError as error:
            raise FileError(f"{path} is damaged: expected a numeric offset and size of {shown(tensor.name)}") from error
        asked += length
        if not 0 <= start <= start + length <= files[place] or asked > TIED * sum(files.values()):
            raise FileError(f"{path} is damaged: {shown(location)} has {files[place]} bytes, and"
                            f" {shown(tensor.name)} asks for more")  # fmt: skip
        try:
            helper.load_external_data_for_tensor(tensor, str(path.parent))
        except Exception as error:
            raise FileError(f"{shown(location)} beside {path} can't be read ({one_line(error)})") from error
        tensor.data_location = tensor.DEFAULT
        del tensor.external_data[:]


def _place(path: Path, location: Any) -> Path | None:
    """The file that a tensor is stored in, links resolved, if it is in the folder of the ONNX file; else None."""
    try:
        place = (path.parent / location).resolve()
        inside = bool(location) and not Path(location).is_absolute() and place.is_relative_to(path.parent.resolve())
        place.is_file()
    except (OSError, ValueError, TypeError):  # a name that no file can have
        return None
    return place if inside else None


def tensors_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Every stored tensor with its name: of the graph, of constants among its operations, and of nested graphs."""
    for number, function in enumerate(model.functions):
        yield from _in_nodes(function.node, f"function{number}.", 0)
    yield from _in_graph(model.graph, "", 0)


def nodes_of(model: Any) -> Iterator[Any]:
    """Every operation, including those of nested graphs and of functions."""
    left: list[tuple[Any, int]] = [(model.graph.node, 0), *((function.node, 0) for function in model.functions)]
    while left:
        nodes, depth = left.pop()
        for node in nodes:
            yield node
            if depth < _DEEPEST:
                left += [(graph.node, depth + 1) for graph in _graphs_in(node)]


def _in_graph(graph: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for tensor in graph.initializer:
        yield f"{prefix}{tensor.name}", tensor
    yield from _in_nodes(graph.node, prefix, depth)


def _in_nodes(nodes: Any, prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield f"{prefix}{node.output[0] if node.output else node.name}", attribute.t
            for tensor in attribute.tensors:
                yield f"{prefix}{node.name}", tensor
        if depth < _DEEPEST:
            for graph in _graphs_in(node):
                yield from _in_graph(graph, f"{prefix}{node.name}.", depth + 1)


def _graphs_in(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
