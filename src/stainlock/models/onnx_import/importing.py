"""`onnx_target`: an ONNX file as a target whose module agrees with ONNX Runtime."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.models.conventions import CONVENTIONS, GUESSED, SIZE_ALONE
from stainlock.models.onnx_import.building import Builder
from stainlock.models.onnx_import.graph import Graph, read_graph, told
from stainlock.models.onnx_import.network import OnnxNetwork, Source
from stainlock.models.onnx_import.operations import OPERATIONS
from stainlock.models.onnx_import.patterns import fused
from stainlock.models.onnx_import.sizes import Known, known_values
from stainlock.storage.onnx_files import check_onnx_installed, open_session
from stainlock.storage.values import shown
from stainlock.storage.weights import check_finite, one_line
from stainlock.target import IMAGENET_MEAN, IMAGENET_STD, Target

_IMAGES = 3
_CLOSE = 1e-3  # relative to the largest output: other kernels sum in another order
_EIGHT_BITS = 0.05  # the same for 8-bit maps: a sum in another order may be rounded to the next level
_COLOURS = (1, 3, 4)


def onnx_target(path: str | Path, input_shape: tuple[int, ...] | None = None) -> Target:
    """The file's operations as a module, with its input size. The file does not say how pixels are normalised."""
    path = Path(path)
    check_onnx_installed()
    if find_spec("onnxruntime") is None:
        raise ModelError("ONNX files need onnxruntime to be imported: pip install stainlock[onnx]")
    graph = read_graph(path, input_shape)
    last = len(graph.shape) == 3 and graph.shape[2] in _COLOURS and min(graph.shape[:2]) > max(_COLOURS)
    model = _build(graph, known_values(graph), last=last)
    check_finite(model, str(path))
    if next(model.parameters(), None) is None:
        raise ModelError(f"{path} has no weights: expected a trained model")
    shape = (graph.shape[2], *graph.shape[:2]) if last else graph.shape
    if input_shape is not None and shape[-len(input_shape) :] != tuple(input_shape):
        raise ModelError(f"{path} takes inputs of {'×'.join(map(str, shape))}: leave out --input-size")
    _compare(graph, model, shape)
    colour = len(shape) == 3 and shape[0] == 3
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if colour else ((0.0,), (1.0,))
    return Target(
        model, shape, mean, std, reference=str(path), known_from=f"the file has the size; the rest {GUESSED}",
        guessed=CONVENTIONS - SIZE_ALONE,
    )  # fmt: skip


def _build(graph: Graph, known: Known, *, last: bool = False) -> OnnxNetwork:
    """The module of a graph; a `ModelError` names any operation without a counterpart."""
    builder = Builder(graph, known, last=last)
    for node in graph.nodes:
        if not node.output or node.output[0] in builder.done or all(name in known for name in node.output if name):
            continue
        if node.domain not in ("", "ai.onnx") or node.op_type not in OPERATIONS:
            domain = f" of {shown(node.domain)}" if node.domain else ""
            raise ModelError(
                f"{graph.path} has {told(node)}{domain}, which has no counterpart here: stain and lock the model it was"
                " exported from; `verify` by weights reads the file as it is"
            )
        try:
            if not fused(builder, node):
                OPERATIONS[node.op_type](builder, node)
        except ModelError:
            raise
        except Exception as error:  # an operation with invalid or unknown arguments
            raise ModelError(f"{graph.path} has {told(node)}, which can't be followed ({one_line(error)})") from error
    missing = [name for name in graph.outputs if name not in builder.values]
    if missing:
        raise ModelError(f"{graph.path} has an output that does not depend on its input: {shown(missing[0])}")
    network = builder.network.eval()
    values = {origin.value: known.constants[origin.value] for origin in network.origins.values() if origin.value}
    network.source = Source(graph, values, builder.readers, bool(builder.rounded))
    return network


def _compare(graph: Graph, model: OnnxNetwork, shape: tuple[int, ...]) -> None:
    """Refuse a module whose outputs differ from ONNX Runtime's for the file."""
    images = torch.rand(_IMAGES, *shape, generator=torch.Generator().manual_seed(1))
    try:
        expected = run_file(graph, images.permute(0, 2, 3, 1).contiguous() if model.channels_last else images)
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise ModelError(f"ONNX Runtime can't run {graph.path} ({one_line(error)})") from error
    try:
        with torch.no_grad():
            found = model(images)
    except Exception as error:  # a file may fix sizes
        raise ModelError(f"{graph.path} is made for a fixed number of images ({one_line(error)}): export it for any"
                         " number (a dynamic batch)") from error  # fmt: skip
    outputs = [found] if isinstance(found, Tensor) else list(found.values())
    close = closeness(model)
    for name, theirs, ours in zip(graph.outputs, expected, outputs, strict=True):
        if tuple(ours.shape) != theirs.shape:
            raise ModelError(
                f"{graph.path} gives {shown(name)} of shape {theirs.shape}, but its operations one by one give"
                f" {tuple(ours.shape)}: export it for any number of images (a dynamic batch)"
            )
        largest = float(np.abs(theirs).max(initial=0.0))
        difference = float(np.abs(theirs.astype(np.float64) - ours.double().numpy()).max(initial=0.0))
        if not difference <= close * max(largest, 1e-12):
            raise ModelError(
                f"{graph.path} can't be followed: its operations one by one give {shown(name)} that differs by"
                f" {difference:.2g} from ONNX Runtime's, which are at most {largest:.2g}"
            )


def closeness(model: OnnxNetwork) -> float:
    """Largest allowed difference from ONNX Runtime's outputs, relative to the largest output."""
    source = model.source
    return _EIGHT_BITS if source is not None and (source.rounds or source.graph.rewritten.rounds) else _CLOSE


def run_file(graph: Graph, images: Tensor) -> list[np.ndarray[Any, Any]]:
    """ONNX Runtime's outputs for images, in batches of the size that the file takes."""
    session = open_session(graph.file.SerializeToString())
    half = session.get_inputs()[0].type == "tensor(float16)"
    given = images.numpy().astype(np.float16 if half else np.float32)
    size = graph.batch or len(given)
    rows = [given[start : start + size] for start in range(0, len(given), size)]
    if graph.batch and len(rows[-1]) < size:
        rows[-1] = np.concatenate([rows[-1], np.repeat(rows[-1][-1:], size - len(rows[-1]), 0)])
    made = [session.run(None, {graph.input: part}) for part in rows]
    return [np.concatenate(parts)[: len(given)] for parts in zip(*made, strict=True)]
