"""export(): write a model in another format."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from stainlock.exports.onnx_copy import write_onnx_copy
from stainlock.exports.writing import Exported, write_export
from stainlock.models.onnx_import.network import OnnxNetwork
from stainlock.storage.staging import Staging
from stainlock.target import Target, check_target

FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch-export": ".pt2"}


def format_of(path: Path, name: str | None) -> str:
    """The requested format, or the one implied by the file's suffix."""
    if name is None:
        found = [known for known, suffix in FORMATS.items() if suffix == path.suffix.lower()]
        if not found:
            raise ValueError(f"expected a name ending in {', '.join(FORMATS.values())}, or --format, got {path}")
        return found[0]
    if name not in FORMATS:
        raise ValueError(f"expected format {', '.join(FORMATS)}, got {name!r}")
    return name


def export(target: Target, path: str | Path, *, format: str | None = None, examples: Tensor | None = None) -> Exported:
    """Write the model as ``safetensors`` (only weights), ``onnx`` or ``torch-export`` (code and weights), and check it.

    The last two include whatever a lock added to the model, in one file that needs neither the model's code nor
    stainlock. With a keyed lock, safetensors holds the weights without the gates. ``examples`` are inputs in the form
    that the model takes, on which the file's outputs are compared with the model's; synthetic inputs by default. A file
    whose outputs differ is not kept. A target that came from an ONNX file is written as that file with new weights; if
    it is locked, as a new file with the same inputs and outputs.

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
    """Like `export`, to a path that is already staged. A model that came from an ONNX file is written as that file with
    the model's weights."""
    if kind == "onnx" and isinstance(target.model, OnnxNetwork) and target.model.source is not None:
        return Exported(kind, write_onnx_copy(target, path), target.model.source.graph.batch is None)
    return write_export(target, path, kind, examples)
