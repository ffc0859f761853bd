"""Our own file format, safetensors with facts and a checksum, with clear errors; and digests of models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from stainlock.errors import FileError
from stainlock.storage.records import DEEPEST, depth_of, parse_json
from stainlock.storage.values import shown

Digests = dict[str, bytes]
MOST_TENSORS = 100_000
_PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of every PNG
_LONGEST_HEADER = 2**26  # bytes; the library's own limit is 100 MB


def pack(kind: str, version: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file with JSON facts in its metadata and a checksum over everything."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    metadata = {"format": f"stainlock-{kind}", "version": str(version), "facts": text}
    return _ordered(save_tensors(stored, metadata | {"checksum": _checksum(metadata, stored)}))


def _ordered(content: bytes) -> bytes:
    """A safetensors file with its metadata sorted by name; the library writes them in any order."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + content[end:]


Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


def unpack(
    path: Path, kind: str, version: int, upgrades: Mapping[int, Upgrade] | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `pack` wrote; a clear `FileError` for a truncated, altered, foreign or newer file.

    ``upgrades`` turn the facts of older versions into those of this version.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"can't read {kind} file {path}: {error.strerror or error}") from error
    if content.startswith(_PNG):
        raise FileError(
            f"{path} is a PNG image, not a stainlock {kind} file: pass a client's patch with `unlock --patch`"
        )
    try:
        metadata = _header(content).get("__metadata__", {})
        tensors = load_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise FileError(
            f"{path} is not a stainlock {kind} file, or is truncated: expected safetensors ({shown(str(error))})"
        ) from error
    found = metadata.get("format")
    if found != f"stainlock-{kind}":
        raise FileError(f"{path} is not a stainlock {kind} file: its format is {shown(found or 'not given')}")
    known: dict[str | None, Upgrade | None] = {str(version): None}
    known |= {str(older): upgrade for older, upgrade in (upgrades or {}).items()}
    if metadata.get("version") not in known:
        raise FileError(
            f"{path} has {kind} format version {shown(metadata.get('version'))}, this program reads {version}:"
            " update stainlock"
        )
    checksum = metadata.pop("checksum", None)
    if checksum != _checksum(metadata, tensors):
        raise FileError(f"{path} was altered after it was written: its checksum does not match")
    upgrade = known[metadata["version"]]
    try:
        facts: dict[str, Any] = parse_json(metadata["facts"])
        if not isinstance(facts, dict) or depth_of(facts) > DEEPEST:
            raise TypeError(f"expected an object as facts, nested at most {DEEPEST} deep")
        return facts if upgrade is None else upgrade(facts), tensors
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is not a complete {kind} file: {shown(str(error))}") from error


def check_header(path: Path) -> None:
    """ValueError if a safetensors file's header is malformed or, before it is parsed, longer than any model's."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if length > min(_LONGEST_HEADER, path.stat().st_size):
            raise ValueError(f"its header would have {length} bytes")
        _header(start + file.read(length))


def _header(content: bytes) -> dict[str, Any]:
    """A safetensors file's header: names, types, shapes and offsets of tensors, and metadata as text."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(_LONGEST_HEADER, len(content) - 8):
        raise ValueError("its header is cut short or too long")
    header = parse_json(content[8 : 8 + length])
    if not isinstance(header, dict) or len(header) > MOST_TENSORS:
        raise ValueError(f"expected a header of at most {MOST_TENSORS} tensors")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("expected texts as metadata")
    return header


def exists(path: Path) -> bool:
    """Whether the path exists; False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, say
        return False


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    digest.update((_first_digest if metadata["version"] == "1" else tensor_digest)(tensors).encode())
    return digest.hexdigest()


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bits, in the order of the names."""
    return combined_digest(tensor_digests(tensors))


def tensor_digests(tensors: Mapping[str, Tensor]) -> Digests:
    """sha256 of each tensor's name, type, shape and bits."""
    digests = {}
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        digests[name] = digest.digest()
    return digests


def combined_digest(digests: Digests) -> str:
    """sha256 over the digests of the tensors. If one tensor changes, the others need not be hashed again."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def model_digest(model: nn.Module) -> str:
    """A digest that identifies a model: over its parameters and buffers, except batch counters."""
    return tensor_digest(_identity(model))


def is_model(model: nn.Module, digest: str) -> bool:
    """Whether a digest is of this model, computed as in this version or in the first."""
    return is_state(model.state_dict(), digest)


def is_state(state: Mapping[str, Tensor], digest: str) -> bool:
    """The same as `is_model` for bare weights."""
    counted = _counted(state)
    return digest == tensor_digest(counted) or digest == _first_digest(counted)


def _first_digest(tensors: Mapping[str, Tensor]) -> str:
    """The digest of the first version: one pass over all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def begin_digests(model: nn.Module) -> Future[Digests]:
    """The digests of a model's tensors, computed in the background. The model must not change meanwhile."""
    executor = ThreadPoolExecutor(1)
    digests = executor.submit(tensor_digests, _identity(model))  # hashing releases Python's global lock
    executor.shutdown(wait=False)
    return digests


def edited_digest(model: nn.Module, before: Digests, written: Iterable[str]) -> str:
    """The digest of a model in which only the named tensors, and those tied to them, changed since ``before``."""
    state = _identity(model)
    storages = {state[name].untyped_storage().data_ptr() for name in written if name in state}
    changed = {
        name: tensor
        for name, tensor in state.items()
        if name not in before or tensor.untyped_storage().data_ptr() in storages
    }
    known = {name: before[name] for name in state if name not in changed}
    return combined_digest(known | tensor_digests(changed))


def _identity(model: nn.Module) -> dict[str, Tensor]:
    return _counted(model.state_dict())


def _counted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
