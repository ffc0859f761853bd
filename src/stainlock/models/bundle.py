"""Bundles: a model directory that can be shipped. ``model.safetensors``, ``stainlock.json``, nothing secret."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from stainlock.errors import FileError, ModelError
from stainlock.insertion import Insertion
from stainlock.storage.files import is_model, model_digest, new_folder
from stainlock.target import Target

BUNDLE_VERSION = 2
_WEIGHTS, _MANIFEST = "model.safetensors", "stainlock.json"
_FIELDS = {"version", "reference", "input_shape", "mean", "std", "bounds", "part", "insertions", "digest"}


def save_bundle(target: Target, path: str | Path) -> None:
    """Write the target's weights and what is needed to build the model again."""
    path = Path(path)
    with new_folder(path) as folder:
        write_bundle(target, folder, path)


def write_bundle(target: Target, folder: Path, final: Path) -> None:
    """Fill a folder that will become ``final``: a factory's file is remembered relative to it."""
    if target.reference is None:
        raise ModelError(
            "this target can't be bundled: it has no reference; load it with Target.from_reference, or set"
            " Target(reference='FILE.py:FACTORY')"
        )
    manifest: dict[str, Any] = {
        "format": "stainlock-bundle",
        "version": BUNDLE_VERSION,
        "reference": _portable(target.reference, final),
        "input_shape": target.input_shape,
        "mean": target.mean,
        "std": target.std,
        "bounds": target.bounds,
        "part": target.part,
        "insertions": [insertion.to_json() for insertion in target.insertions],
        "digest": model_digest(target.model),
    }
    save_file(_separate(target.model.state_dict()), folder / _WEIGHTS)
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for name in (_WEIGHTS, _MANIFEST):
        (folder / name).chmod(0o644)  # to be shipped, not a secret


def _separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory (tied weights)."""
    seen: set[int] = set()
    result = {}
    for name, tensor in state.items():
        shared = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        result[name] = tensor.detach().clone() if shared else tensor.detach().contiguous()
    return result


def _portable(reference: str, final: Path) -> str:
    file, colon, factory = reference.rpartition(":")
    if not colon or not file.endswith(".py"):
        return reference
    return f"{os.path.relpath(Path(file).resolve(), final.resolve())}:{factory}"


def load_bundle(path: str | Path) -> Target:
    """Build the model a bundle describes and check that its weights are the ones written then."""
    from stainlock.models.references import load_reference
    from stainlock.storage.weights import load_weights, read_weights

    path = Path(path)
    manifest = _read_manifest(path)
    conventions = _conventions(manifest, path)
    reference = manifest["reference"]
    file, colon, factory = reference.rpartition(":")
    if colon and file.endswith(".py"):
        reference = f"{Path(os.path.normpath(path.resolve() / file))}:{factory}"
    built = load_reference(reference, weights=None if file.endswith(".py") else "random")
    for facts in manifest["insertions"]:
        built = Insertion.from_json(facts).insert(built)
    stored = read_weights(path / _WEIGHTS)
    for name, tensor in (*built.model.named_parameters(), *built.model.named_buffers()):
        if name in stored:  # half precision, wholly or in part, comes back as it was saved
            tensor.data = tensor.data.to(stored[name].dtype)
    load_weights(built.model, path / _WEIGHTS)
    if not is_model(built.model, manifest["digest"]):
        raise FileError(f"{path / _WEIGHTS} was altered after it was written: its digest differs from {_MANIFEST}")
    try:
        return replace(built, **conventions, reference=reference)
    except ValueError as error:
        raise FileError(f"{path / _MANIFEST} is damaged: {error}") from error


def _conventions(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Pixel conventions, checked by a target of their own before a model is built with them."""
    try:
        names = ("input_shape", "mean", "std", "bounds")
        facts: dict[str, Any] = {name: tuple(manifest[name]) for name in names}
        facts["part"] = manifest["part"]
        Target(nn.Identity(), **{**facts, "part": ""})
    except (TypeError, ValueError) as error:
        raise FileError(f"{path / _MANIFEST} is damaged: {error}") from error
    return facts


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != "stainlock-bundle":
            raise KeyError("format")
        if manifest.get("version") == 1:  # before there were blocks to put in
            manifest |= {"version": BUNDLE_VERSION, "insertions": []}
        missing = _FIELDS - set(manifest)
        if missing:
            raise KeyError(sorted(missing)[0])
        if not isinstance(manifest["reference"], str) or not isinstance(manifest["part"], str):
            raise TypeError("reference and part must be text")
    except OSError as error:
        raise FileError(f"{path} is not a bundle: can't read {_MANIFEST} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path / _MANIFEST} is damaged or not a bundle's: {error}") from error
    if manifest["version"] != BUNDLE_VERSION:
        raise FileError(f"{path} has bundle version {manifest['version']}, this program reads {BUNDLE_VERSION}")
    return manifest
