"""export(): a model in another form, whose outputs are compared with the model's before anyone gets the file."""

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
from stainlock.models.onnx_import.network import OnnxNetwork
from stainlock.probes import probe_inputs
from stainlock.storage.staging import Staging
from stainlock.storage.weights import load_state, one_line
from stainlock.target import Target, check_target, evaluation_mode

FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2"}
_CLOSE = 1e-3  # of the largest output: other kernels sum in another order


@dataclass(frozen=True)
class Exported:
    """What `export` wrote. ``max_difference`` is the largest one between an output of the file and of the model;
    ``any_batch`` says whether it takes any number of images, or one at a time.

    >>> sl.export(stained, "stained.pt2").any_batch
    True
    """

    format: str
    max_difference: float
    any_batch: bool


def format_of(path: Path, name: str | None) -> str:
    """The format asked for, or the one that the file's name tells."""
    if name is None:
        found = [known for known, suffix in FORMATS.items() if suffix == path.suffix.lower()]
        if not found:
            raise ValueError(f"expected a name ending in {', '.join(FORMATS.values())}, or --format, got {path}")
        return found[0]
    if name not in FORMATS:
        raise ValueError(f"expected format {', '.join(FORMATS)}, got {name!r}")
    return name


def export(target: Target, path: str | Path, *, format: str | None = None, examples: Tensor | None = None) -> Exported:
    """Write the model as ``safetensors`` (weights alone), ``onnx`` or ``torch-export`` (code and weights), and compare.

    The last two hold whatever a lock has put into the model, in one file that needs neither its code nor stainlock. Of
    a keyed lock the weights alone are without the gates. ``examples`` are inputs as the model takes them, on which
    both are run; synthetic ones by default. A file that computes something else is not kept. A target that came from an
    ONNX file goes out as that file with other weights in it; a locked one with its inputs and outputs.

    >>> sl.export(stained, "stained.safetensors").max_difference
    0.0
    """
    check_target(target)
    path = Path(path)
    kind = format_of(path, format)
    with Staging([path]) as staging:
        found = write_as(target, staging.place(path), kind, examples)
        staging.commit()
    return found


def write_as(target: Target, path: Path, kind: str, examples: Tensor | None = None) -> Exported:
    """The same, to a path that is being staged already. A model that came as an ONNX file goes out as that file with
    its own weights in it."""
    if kind == "onnx" and isinstance(target.model, OnnxNetwork) and target.model.source is not None:
        from stainlock.exports.onnx_copy import write_onnx_copy

        return Exported(kind, write_onnx_copy(target, path), target.model.source.graph.batch is None)
    return write_export(target, path, kind, examples)


def write_export(target: Target, path: Path, kind: str, examples: Tensor | None = None) -> Exported:
    """The same by PyTorch's exporters alone."""
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
                f"an object detector takes lists of images of any size, which {kind} does not hold: use safetensors"
            )
        any_batch = _write_program(target, path, kind, examples)
        ran = run_onnx(path) if kind == "onnx" else run_program(path)
    path.chmod(0o644)  # to be shipped, not a secret
    return Exported(kind, _difference(target, ran, examples, any_batch), any_batch)


def _write_program(target: Target, path: Path, kind: str, examples: Tensor) -> bool:
    """Whether the file takes batches of any size: where the model's code fixes it, images go in one at a time."""
    if kind == "onnx":
        check_packages()
    make, write = (onnx_program, write_onnx) if kind == "onnx" else (exported_program, write_program)
    others = (None,) * len(target.extra_inputs)
    sizes = ({0: torch.export.Dim("images", min=1)}, *others)
    first: Exception | None = None
    for any_batch, inputs, shapes in ((True, examples[:2], sizes), (False, examples[:1], None)):
        try:
            program = make(target, inputs, shapes)
        except Exception as error:  # exporters run code of the model's, and fail in many ways
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
    whole = replace(target, output="")  # a file has all that the model returns

    def run(inputs: Any, *_: Any) -> list[Tensor]:
        with evaluation_mode(target.model), torch.no_grad():
            return [leaf for leaf in tree_leaves(whole(inputs)) if isinstance(leaf, Tensor)]

    return run


def _difference(target: Target, ran: Callable[..., list[Tensor]], examples: Tensor, any_batch: bool) -> float:
    batches = [examples] if any_batch else list(examples.split(1))
    largest, size = 0.0, 0.0
    for batch in batches:
        expected, found = _runner(target)(batch), ran(batch, *target.extra_inputs)
        if [tuple(t.shape) for t in expected] != [tuple(t.shape) for t in found]:
            raise ModelError("the exported file has outputs of other shapes than the model: it was not kept")
        for mine, theirs in zip(expected, found, strict=True):
            if mine.numel():
                largest = max(largest, float((mine.double() - theirs.double()).abs().max()))
                size = max(size, float(mine.double().abs().max()))
    if not largest <= _CLOSE * size:
        raise ModelError(
            f"the exported file computes something else: its outputs differ by {largest:.2g} where the model's are at"
            f" most {size:.2g}; it was not kept"
        )
    return largest
