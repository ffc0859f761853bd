"""Files that suspects come in besides weight files: 8-bit layers, programs of torch.export, TorchScript, ONNX."""

from __future__ import annotations

import functools
import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from mutations import spoil_bytes, spoil_json
from torch import nn

from stainlock.storage.deployed import read_deployed


@functools.cache
def quantised() -> list[bytes]:
    """Tensors with one scale, with one for each row, and the packed pairs of 8-bit Linear layers."""
    weight = torch.linspace(-1, 1, 64).view(8, 8)
    scales, zeros = torch.full((8,), 0.01), torch.zeros(8, dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch means to give up such tensors; files have them all the same
        whole = torch.quantize_per_tensor(weight, 0.01, 3, torch.qint8)
        rows = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    name = "fc._packed_params._packed_params"
    states = [{"conv.weight": whole, "conv.scale": torch.ones(1)}, {"conv.weight": rows, name: (rows, torch.zeros(8)),
              "fc._packed_params.dtype": torch.qint8}]  # fmt: skip
    buffers = [io.BytesIO() for _ in states]
    for state, buffer in zip(states, buffers, strict=True):
        torch.save(state, buffer)
    return [buffer.getvalue() for buffer in buffers]


@functools.cache
def programs() -> list[bytes]:
    buffer = io.BytesIO()
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    torch.export.save(torch.export.export(model, (torch.zeros(1, 8),)), buffer)
    return [buffer.getvalue()]


@functools.cache
def scripts() -> list[bytes]:
    """Modules with names, constants without, and 8-bit tensors."""
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    example, made = torch.zeros(1, 8), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch means to give up TorchScript; files have it all the same
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        traced = torch.jit.trace(model, example)
        for one in (traced, torch.jit.freeze(traced), torch.jit.trace(small, example)):
            buffer = io.BytesIO()
            torch.jit.save(one, buffer)
            made.append(buffer.getvalue())
    return made


def spoil_script(content: bytes, random: Random) -> bytes:
    def spoiled(name: str, data: bytes) -> bytes:
        often = 1 if name.endswith(".pkl") else 9
        return spoil_bytes(data, random) if random.randint(0, often) == 0 else data

    return _rewritten(content, spoiled)


def spoil_quantised(content: bytes, random: Random) -> bytes:
    return _rewritten(content, lambda name, data: spoil_bytes(data, random) if random.randint(0, 3) == 0 else data)


def spoil_program(content: bytes, random: Random) -> bytes:
    def spoiled(name: str, data: bytes) -> bytes:
        if name.endswith("model_weights_config.json"):
            return json.dumps(spoil_json(json.loads(data), random)).encode()
        return spoil_bytes(data, random) if random.randint(0, 9) == 0 else data

    return _rewritten(content, spoiled)


def _rewritten(content: bytes, change: Callable[[str, bytes], bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(buffer, "w") as made:
        for member in source.infolist():
            made.writestr(member.filename, change(member.filename, source.read(member)))
    return buffer.getvalue()


def use(path: Path) -> None:
    for tensor in read_deployed(path).values():
        tensor.float().sum().item()
