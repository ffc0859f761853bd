"""Our own file format, safetensors with facts and a checksum, with clear errors; and digests of models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from stainlock.errors import FileError
from stainlock.numerics import _first_digest, tensor_digest
from stainlock.storage.records import DEEPEST, depth_of, parse_json
from stainlock.storage.values import shown

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
