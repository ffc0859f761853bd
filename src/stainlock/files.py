"""Files that appear whole or not at all, and safetensors files that explain what is wrong with them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from stainlock.errors import FileError


def refuse_existing(path: Path) -> None:
    """A clear line now, before hours of work, if the path can't be written later."""
    if path.exists() or path.is_symlink():
        raise FileError(f"{path} exists already: choose another path or remove it")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise FileError(f"can't write {path}: {parent} is not a writable folder")


def write_file(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a new file atomically; secrets are readable by their owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o600 if secret else 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``path`` at the end, or vanishes if anything goes wrong."""
    refuse_existing(path)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.absolute().parent, prefix=f".{path.name}."))
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def pack(kind: str, version: int, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file with JSON facts in its metadata and a checksum over everything."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    metadata = {"format": f"stainlock-{kind}", "version": str(version), "facts": text}
    return save_tensors(stored, metadata | {"checksum": _checksum(metadata, stored)})


def unpack(path: Path, kind: str, version: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `pack` wrote; a truncated, altered, foreign or newer file gets one clear line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"can't read {kind} file {path}: {error.strerror or error}") from error
    try:
        tensors = load_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header.get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError) as error:
        raise FileError(
            f"{path} is not a stainlock {kind} file, or is truncated: expected safetensors ({error})"
        ) from error
    found = metadata.get("format")
    if found != f"stainlock-{kind}":
        raise FileError(f"{path} is not a stainlock {kind} file: its format is {found or 'not given'}")
    if metadata.get("version") != str(version):
        raise FileError(
            f"{path} has {kind} format version {metadata.get('version')}, this program reads {version}:"
            " update stainlock"
        )
    checksum = metadata.pop("checksum", None)
    if checksum != _checksum(metadata, tensors):
        raise FileError(f"{path} was altered after it was written: its checksum does not match")
    return json.loads(metadata["facts"]), tensors


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    digest.update(tensor_digest(tensors).encode())
    return digest.hexdigest()


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bits, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_digest(model: nn.Module) -> str:
    """A model's identity: its parameters and buffers, counters apart."""
    return tensor_digest({k: v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")})
