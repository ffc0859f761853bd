"""Writing a model in a format, and comparing the file's outputs with the model's before the file is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stainlock.errors import ModelError
from stainlock.exports.onnx_file import check_packages, onnx_program, run_onnx, write_onnx
from stainlock.exports.program import exported_program, run_program, write_program
from stainlock.models.bundle import separate_tensors
from stainlock.storage.weights import load_state, one_line
from stainlock.target import Target, evaluation_mode, probe_inputs

CLOSE = 1e-3  # largest allowed difference, relative to the largest output: other kernels sum in a different order


@dataclass(frozen=True)
class Exported:
    """What `export` wrote. ``max_difference`` is the largest difference between an output of the file and of the model.
    ``any_batch``: the file accepts batches of any size, not only one image at a time.

    >>> sl.export(stained, "stained.pt2").any_batch
    True
    """

    format: str
    max_difference: float
    any_batch: bool


def write_export(
    target: Target, path: Path, kind: str, examples: Tensor | None = None, *, close: float = CLOSE
) -> Exported:
    """Like `write_as`, but never as a copy of an ONNX file. Outputs may differ by ``close`` times the largest."""
    if examples is None:
        examples = target.normalise(probe_inputs(target, "exported"))
    if kind == "safetensors":
        save_file(separate_tensors(target.model.state_dict()), path)
        other = target.with_model(copy.deepcopy(target.model))
        with torch.no_grad():
            for parameter in other.model.parameters():
                parameter.zero_()
        load_state(other.model, load_file(path), str(path))
        ran, any_batch = _runner(other), True
    else:
        if target.normalises:
            raise ModelError(
                f"an object detector takes lists of images of any size, which {kind} can't represent: use safetensors"
            )
        any_batch = _write_program(target, path, kind, examples)
        ran = run_onnx(path) if kind == "onnx" else run_program(path)
    path.chmod(0o644)  # to be shipped, not a secret
    return Exported(kind, _difference(target, ran, examples, any_batch, close), any_batch)


def _write_program(target: Target, path: Path, kind: str, examples: Tensor) -> bool:
    """Write the file. True if it accepts any batch size; if the model's code fixes it, one image at a time."""
    if kind == "onnx":
        check_packages()
    make, write = (onnx_program, write_onnx) if kind == "onnx" else (exported_program, write_program)
    others = (None,) * len(target.extra_inputs)
    sizes = ({0: torch.export.Dim("images", min=1)}, *others)
    first: Exception | None = None
    for any_batch, inputs, shapes in ((True, examples[:2], sizes), (False, examples[:1], None)):
        try:
            program = make(target, inputs, shapes)
        except Exception as error:  # exporters run the model's own code, which can fail in many ways
            first = first or error
            continue
        write(program, path)
        return any_batch
    assert first is not None
    instead = "torch-export" if kind == "onnx" else "onnx"
    raise ModelError(
        f"PyTorch can't export this model as {kind} ({one_line(first)}): try {instead}, or safetensors"
    ) from first


def _runner(target: Target) -> Callable[..., list[Tensor]]:
    whole = replace(target, output="")  # the file returns all of the model's outputs

    def run(inputs: Any, *_: Any) -> list[Tensor]:
        with evaluation_mode(target.model), torch.no_grad():
            return [leaf for leaf in tree_leaves(whole(inputs)) if isinstance(leaf, Tensor)]

    return run


def _difference(
    target: Target, ran: Callable[..., list[Tensor]], examples: Tensor, any_batch: bool, close: float
) -> float:
    batches = [examples] if any_batch else list(examples.split(1))
    largest, size = 0.0, 0.0
    for batch in batches:
        expected, found = _runner(target)(batch), ran(batch, *target.extra_inputs)
        if [tuple(t.shape) for t in expected] != [tuple(t.shape) for t in found]:
            raise ModelError("the exported file's outputs have other shapes than the model's: it was not kept")
        for mine, theirs in zip(expected, found, strict=True):
            if mine.numel():
                largest = max(largest, float((mine.double() - theirs.double()).abs().max()))
                size = max(size, float(mine.double().abs().max()))
    if not largest <= close * size:
        raise ModelError(
            f"the exported file's outputs differ from the model's by up to {largest:.2g} (the largest output is"
            f" {size:.2g}): it was not kept"
        )
    return largest
