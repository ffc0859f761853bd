"""Bundles: folders with a model to ship, ``model.safetensors`` and ``stainlock.json``, with nothing secret in them.

A bundle may come from a stranger. Reading one runs nothing and builds nothing; building one runs code only if the
caller names it, or trusts the code that the bundle names.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from stainlock.errors import FileError, ModelError
from stainlock.insertion import Insertion, insert_all, read_insertions
from stainlock.models.factories import build_reference
from stainlock.models.libraries import LIBRARIES, check_bundled_reference, is_built_by_name, named_reference
from stainlock.numerics import is_model, is_state, model_digest
from stainlock.storage.durable import final_name, sync_tree, write_file
from stainlock.storage.onnx_files import is_onnx
from stainlock.storage.records import read_json
from stainlock.storage.staging import new_folder
from stainlock.storage.values import check_text, shown
from stainlock.storage.weights import load_state, one_line, read_weights
from stainlock.target import Target, check_target

BUNDLE_VERSION = 3
WEIGHTS, MANIFEST = "model.safetensors", "stainlock.json"
_CONVENTIONS = ("input_shape", "mean", "std", "bounds")
_FIELDS = {"version", "reference", *_CONVENTIONS, "part", "insertions", "digest"}
_MOST_CHANNELS = 4096  # mean and std have one number per channel
_MOST_INPUTS = 2**26  # values in one input: 256 MB as float32

Architecture = str | nn.Module | Target


def save_bundle(target: Target, path: str | Path) -> None:
    """Write the target's weights and what is needed to rebuild the model.

    >>> target = sl.Target.from_reference("torchvision:squeezenet1_1?num_classes=10", weights="random")
    >>> sl.save_bundle(target, "bundle")
    >>> sl.load_bundle("bundle").reference
    'torchvision:squeezenet1_1?num_classes=10'
    """
    check_target(target)
    with new_folder(Path(path)) as folder:
        write_bundle(target, folder)


def write_bundle(target: Target, folder: Path) -> str:
    """Fill an empty folder and return the model's digest."""
    if target.reference is None:
        raise ModelError(
            "this target can't be bundled: it has no reference; load it with Target.from_reference, or set"
            " Target(reference='FILE.py:FACTORY')"
        )
    if is_onnx(target.reference):
        raise ModelError(
            f"{Path(target.reference).name} is an ONNX file, which a bundle can't hold: `stain`, `lock` and `apply`"
            " write it as FILE.onnx, in Python sl.export(target, 'FILE.onnx')"
        )
    manifest: dict[str, Any] = {
        "format": "stainlock-bundle",
        "version": BUNDLE_VERSION,
        "reference": _without_folders(named_reference(target.reference, target.model)),
        "input_shape": target.input_shape,
        "mean": target.mean,
        "std": target.std,
        "bounds": target.bounds,
        "part": target.part,
        **({"output": target.output} if target.output else {}),
        "insertions": [insertion.to_json() for insertion in target.insertions],
        "digest": model_digest(target.model),
    }
    manifest["checksum"] = _checksum(manifest)
    try:
        save_file(separate_tensors(target.model.state_dict()), folder / WEIGHTS)
    except (SafetensorError, OSError) as error:  # a full disk, say
        raise FileError(f"can't write {final_name(folder / WEIGHTS)} ({one_line(error)})") from error
    (folder / WEIGHTS).chmod(0o644)  # to be shipped, not a secret
    sync_tree(folder / WEIGHTS)
    write_file(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return str(manifest["digest"])


def separate_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory (tied weights), which safetensors refuses."""
    seen: set[int] = set()
    result = {}
    for name, tensor in state.items():
        shared = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        result[name] = tensor.detach().clone() if shared else tensor.detach().contiguous()
    return result


def _without_folders(reference: str) -> str:
    """A factory or file by its name alone, so that the owner's folders are not revealed."""
    if not _is_code(reference):
        return reference
    library, _, rest = reference.partition(":")
    if library in LIBRARIES:
        own = Path(rest).name
        return f"{library}:./{own}" if is_built_by_name(f"{library}:{own}") else f"{library}:{own}"
    file, _, factory = reference.rpartition(":")
    return f"{Path(file).name}:{factory}"


def _is_code(reference: str) -> bool:
    """Whether a model is built from the owner's own code or files, which a bundle can only name."""
    file, colon, _ = reference.rpartition(":")
    if reference.partition(":")[0] in LIBRARIES:
        return not is_built_by_name(reference)
    return bool(colon) and file.endswith(".py")


def _checksum(manifest: Mapping[str, Any]) -> str:
    """sha256 of everything else in the manifest, which includes the digest of the weights."""
    rest = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read and whose digests were checked. Nothing was built, and none of its code was run."""

    path: Path
    reference: str
    conventions: dict[str, Any]
    insertions: tuple[Insertion, ...]
    weights: dict[str, Tensor]
    digest: str

    @staticmethod
    def read(path: str | Path) -> Bundle:
        path = Path(path)
        for name in (MANIFEST, WEIGHTS):
            if not (path / name).is_file():
                raise FileError(f"{path} is not a bundle, it has no {name}")
        manifest = _read_manifest(path)
        conventions = _conventions(manifest, path)
        weights = read_weights(path / WEIGHTS)
        if not is_state(weights, manifest["digest"]):
            raise FileError(
                f"{path / WEIGHTS} was altered after it was written: its digest differs from {MANIFEST}; a weight"
                " file can be verified by itself"
            )
        return Bundle(path, manifest["reference"], conventions, manifest["insertions"], weights, manifest["digest"])

    @property
    def needs_code(self) -> bool:
        """Whether the model is built by Python code, which a bundle can only name."""
        return _is_code(self.reference)

    @property
    def size(self) -> int:
        """The most values that a model of these weights can have; they may lack the counter of each batch norm."""
        return sum(tensor.numel() for tensor in self.weights.values()) + len(self.weights)

    @property
    def code(self) -> str:
        """The ``FILE.py:FACTORY`` that is run if the bundle is trusted: in its folder, or beside it."""
        file, _, factory = self.reference.rpartition(":")
        folder = self.path.resolve()
        places = [(folder / file).resolve(), (folder.parent / file).resolve()]
        return f"{next((place for place in places if place.is_file()), places[0])}:{factory}"

    def build(self, *, model: Architecture | None = None, trust_code: bool = False) -> Target:
        """The target with the bundle's weights.

        ``model`` is the architecture: ``FILE.py:FACTORY``, a library's model, a module or a target; its weights are
        not used, and the object itself is not changed. Without it, a library's model is built by name; code that the
        bundle names is run only with ``trust_code``.
        """
        built = self._architecture(model, trust_code)
        built = insert_all(built, self.insertions, self.size)
        for name, tensor in (*built.model.named_parameters(), *built.model.named_buffers()):
            if name in self.weights:  # keep each tensor's saved precision, which may be half
                tensor.data = tensor.data.to(self.weights[name].dtype)
        load_state(built.model, self.weights, str(self.path / WEIGHTS))
        if not is_model(built.model, self.digest):  # a model that ties weights which differ in the file
            raise FileError(
                f"{self.path / WEIGHTS} can't be loaded into this model completely: the digest differs afterwards"
            )
        built.model.eval()
        try:
            return replace(
                built,
                **self.conventions,
                reference=built.reference or self.reference,
                known_from="the bundle",
                guessed=frozenset(),
            )
        except ValueError as error:
            raise FileError(f"{self.path / MANIFEST} is damaged: {error}") from error

    def _architecture(self, model: Architecture | None, trust_code: bool) -> Target:
        if isinstance(model, Target):
            return model.copy()
        if isinstance(model, nn.Module):
            return Target(copy.deepcopy(model))
        if model is not None:
            if Path(model).is_dir():
                raise ModelError(f"expected FILE.py:FACTORY or a library's model to build {self.path} with, got"
                                 f" the folder {model}")  # fmt: skip
            return build_reference(model, weights="random" if model.partition(":")[0] in LIBRARIES else None)
        if not self.needs_code:
            check_bundled_reference(self.reference, self.size)
            return build_reference(self.reference, weights="random")
        if self.reference.partition(":")[0] in LIBRARIES:
            raise ModelError(
                f"{self.path} is built by {self.reference}, which it does not hold: give yours as --model"
                f" {self.reference.partition(':')[0]}:... (in Python model=)"
            )
        if not trust_code:
            raise ModelError(
                f"{self.path} is built by Python code, {self.reference}, and a bundle's code is not run unasked: give"
                " it as --model FILE.py:FACTORY (unlock: --code, in Python model=), or, if you trust the bundle, add"
                " --trust-code (trust_code=True)"
            )
        return build_reference(self.code)


def insertions_said(folder: Path) -> tuple[Insertion, ...]:
    """The insertions that a folder's manifest lists, even if its digests do not match; none if it can't be read.

    Someone who changes the weights rarely updates the manifest, and what it says about a lock still helps to open it.
    """
    try:
        return read_insertions(read_json(folder / MANIFEST, "bundle's manifest").get("insertions", []))
    except (FileError, ValueError, KeyError, TypeError, AttributeError):
        return ()


def load_bundle(path: str | Path, *, model: Architecture | None = None, trust_code: bool = False) -> Target:
    """Read a bundle, check its digests, and build the model it describes: see `Bundle.build`.

    >>> target = sl.Target.from_reference("torchvision:squeezenet1_1?num_classes=10", weights="random")
    >>> sl.save_bundle(target, "bundle")
    >>> torch.equal(sl.load_bundle("bundle").model.classifier[1].weight, target.model.classifier[1].weight)
    True
    """
    return Bundle.read(path).build(model=model, trust_code=trust_code)


def _conventions(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Pixel conventions, checked on a dummy target before a model is built with them."""
    try:
        facts: dict[str, Any] = {name: tuple(manifest[name]) for name in _CONVENTIONS}
        for name, values in facts.items():
            most = 3 if name == "input_shape" else _MOST_CHANNELS
            if len(values) > most:
                raise ValueError(f"expected at most {most} numbers as {name}")
            if not all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values):
                raise ValueError(f"expected finite numbers as {name}")
        if not all(isinstance(n, int) for n in facts["input_shape"]) or math.prod(facts["input_shape"]) > _MOST_INPUTS:
            raise ValueError(f"expected an input_shape of at most {_MOST_INPUTS} numbers")
        Target(nn.Identity(), **facts)
        facts["part"] = manifest["part"]
        if manifest.get("output"):  # otherwise the owner's own Target decides
            facts["output"] = manifest["output"]
    except (TypeError, ValueError, OverflowError) as error:
        raise FileError(f"{path / MANIFEST} is damaged: {error}") from error
    return facts


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = read_json(path / MANIFEST, "bundle's manifest")
        if manifest["format"] != "stainlock-bundle":
            raise KeyError("format")
        version = manifest["version"]
        if not isinstance(version, int) or not 1 <= version <= BUNDLE_VERSION:
            raise FileError(f"{path} has bundle version {shown(version)}, this program reads up to {BUNDLE_VERSION}")
        if version == 1:  # written before there were insertions
            manifest |= {"insertions": []}
        missing = _FIELDS - set(manifest)
        if missing:
            raise KeyError(sorted(missing)[0])
        for name in ("reference", "part", "digest"):
            check_text(manifest[name], name)
        check_text(manifest.get("output", ""), "output")
        if version == BUNDLE_VERSION and manifest.get("checksum") != _checksum(manifest):
            raise ValueError("it was altered after it was written, its checksum does not match")
        manifest["insertions"] = read_insertions(manifest["insertions"])
    except OSError as error:
        raise FileError(f"{path} is not a bundle: can't read {MANIFEST} ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{path / MANIFEST} is damaged or not a bundle's: {error}") from error
    return manifest
