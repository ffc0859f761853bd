"""Models as ONNX files. The exporter records source lines and file paths for every operation; these are removed."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.exports.onnx_cipher import cipher_as_one_operation
from stainlock.storage.onnx_files import open_session
from stainlock.target import Target, evaluation_mode

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def check_packages() -> None:
    for package in PACKAGES:
        if find_spec(package) is None:
            raise ModelError(f"ONNX needs {package}: pip install stainlock[onnx]")


def onnx_program(target: Target, inputs: Tensor, dynamic_shapes: Any = None) -> Any:
    """Export the model with torch.onnx, quietly. This runs the model's own code, which can fail in many ways."""
    with quietly(), evaluation_mode(target.model), cipher_as_one_operation() as translations:
        return torch.onnx.export(
            target.model, (inputs, *target.extra_inputs), dynamo=True, verbose=False, external_data=False,
            dynamic_shapes=dynamic_shapes, custom_translation_table=translations,
        )  # fmt: skip


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress what exporters and quantisers print, warn about and log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def write_onnx(program: Any, path: Path) -> None:
    """Write the file without source lines, module names and the exporter's other metadata."""
    onnx: Any = importlib.import_module("onnx")
    model = program.model_proto
    model.doc_string = ""
    del model.metadata_props[:]
    for graph in _graphs(model.graph):
        graph.doc_string = ""
        for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer, graph):
            part.doc_string = ""
            del part.metadata_props[:]
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]
    onnx.save(model, str(path))


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def run_onnx(path: Path) -> Callable[..., list[Tensor]]:
    """A function that runs the file with ONNX Runtime."""
    session = open_session(str(path))
    names = [given.name for given in session.get_inputs()]

    def run(*inputs: Any) -> list[Tensor]:
        given = {name: torch.as_tensor(value).cpu().numpy() for name, value in zip(names, inputs, strict=False)}
        outputs: Sequence[Any] = session.run(None, given)
        return [torch.as_tensor(output) for output in outputs]

    return run
