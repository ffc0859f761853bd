"""client_kit(): write the folder that an owner ships."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.exports.export import FORMATS as EXPORTED
from stainlock.exports.writing import write_export
from stainlock.gating.structure import KIND, Structure
from stainlock.key import Key
from stainlock.kits.loader import MODEL_FILES, Shipped, loader_source
from stainlock.kits.readme import readme_text
from stainlock.kits.runtime import runtime_source
from stainlock.models.bundle import write_bundle
from stainlock.storage.durable import write_file
from stainlock.storage.staging import new_folder
from stainlock.target import Target, check_target, synthetic_inputs
from stainlock.unlocking.noise import trigger_bytes
from stainlock.unlocking.patch_file import Patch
from stainlock.unlocking.unlock import unlock_transform

FORMATS = (*EXPORTED, "bundle")
_FIRST_CHOICE, _ALWAYS = "torch-export", "safetensors"


@dataclass(frozen=True)
class Kit:
    """What was written. ``max_difference`` is the largest difference between the file's outputs and the model's.
    ``reason`` is set if no format was requested and the usual one failed.

    >>> sl.client_kit(stained, "for-acme").files
    ('README.txt', 'load.py', 'model.pt2')
    """

    format: str
    max_difference: float
    files: tuple[str, ...]
    reason: str = ""


def client_kit(target: Target, folder: str | Path, *, key: Key | None = None, format: str | None = None) -> Kit:
    """Write everything a client needs to run a protected model without stainlock, and nothing else.

    ``key`` is a lock's key, from which the patch is taken. Leave it out for a stain: the kit must not reveal it.
    ``format`` is ``torch-export`` (one file that needs only torch), ``onnx``, ``safetensors`` (the client provides the
    architecture) or ``bundle`` (for clients who have stainlock). The default is torch-export, or safetensors for object
    detectors and for models that PyTorch can't export. An exported file's outputs are compared with the model's, with
    and without the patch.

    >>> sl.client_kit(locked, "for-acme", key=lock_key, format="safetensors").files
    ('README.txt', 'gates.py', 'load.py', 'model.safetensors', 'patch.png')
    """
    with new_folder(Path(folder)) as place:
        return write_kit(target, place, key=key, format=format)


def write_kit(target: Target, folder: Path, *, key: Key | None = None, format: str | None = None) -> Kit:
    """Write the kit into an empty folder."""
    check_target(target)
    if format is not None and format not in FORMATS:
        raise ValueError(f"expected format {', '.join(FORMATS)}, got {format!r}")
    if key is not None:
        key.check_lock()
    reason = ""
    if format is None:
        format = _ALWAYS if target.normalises else _FIRST_CHOICE
        try:
            found = _model(target, folder, key, format)
        except ModelError as error:
            (folder / MODEL_FILES[format]).unlink(missing_ok=True)
            if format == _ALWAYS:
                raise
            format, reason = _ALWAYS, str(error)
            found = _model(target, folder, key, format)
    else:
        found = _model(target, folder, key, format)
    shipped, difference = found
    write_file(folder / "README.txt", readme_text(shipped).encode())
    if shipped.patch is not None:
        write_file(folder / "patch.png", shipped.patch.to_png(), secret=True)
    elif shipped.vector and key is not None:
        write_file(folder / "trigger.safetensors", trigger_bytes(key), secret=True)
    if format != "bundle":
        write_file(folder / "load.py", loader_source(shipped).encode())
        if shipped.gates or (target.normalises and shipped.patch is not None):
            structure = Structure.of(target) if shipped.gates else None
            source = runtime_source(structure, detects=target.normalises and shipped.patch is not None)
            write_file(folder / "gates.py", source.encode())
    return Kit(format, difference, tuple(sorted(path.name for path in folder.iterdir())), reason)


def _model(target: Target, folder: Path, key: Key | None, format: str) -> tuple[Shipped, float]:
    """Write the model's file; return what the loader needs to know about it, and the largest output difference."""
    blocks = {insertion.kind for insertion in target.insertions} - {KIND}
    if blocks and format in ("safetensors", "bundle"):
        told = "would name the blocks" if format == "bundle" else "has no code for the blocks"
        raise ModelError(
            f"{format} {told} that this lock inserted ({', '.join(sorted(blocks))}): use torch-export or onnx"
        )
    any_batch, difference = True, 0.0
    if format == "bundle":
        bundle = folder / MODEL_FILES[format]
        bundle.mkdir()
        bundle.chmod(0o755)
        write_bundle(target, bundle)
    else:
        found = write_export(target, folder / MODEL_FILES[format], format, _examples(target, key))
        any_batch, difference = found.any_batch, found.max_difference
    vector, patch = 0, None
    if key is not None and key.carrier == "entries":
        vector = target.input_shape[0] - int(key.conventions["input_shape"][0])
    elif key is not None:
        patch = Patch.from_key(key)
    gates = format == "safetensors" and Structure.of(target) is not None
    return Shipped(format, target, patch, vector, gates, any_batch), difference


def _examples(target: Target, key: Key | None) -> Tensor:
    """Inputs in the form that the model takes. With a key, the first half have the patch, as the client's will."""
    generator = torch.Generator().manual_seed(0)
    plain = synthetic_inputs(target, 2, generator)
    prepared = plain.to(target.device, target.dtype) if target.normalises else target.normalise(plain)
    if key is None or target.normalises:
        return prepared
    shape = tuple(key.conventions["input_shape"])
    low, high = target.bounds
    pixels = low + (high - low) * torch.rand(2, *shape, generator=generator)
    opened = unlock_transform(key)(pixels).to(prepared)
    return torch.cat([opened, prepared])
