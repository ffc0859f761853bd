"""Weights as deployed models store them: 8-bit layers, ONNX files, TorchScript archives, torch.export programs.

None of these can be loaded into the model they were made from, but a suspect's weights can be read from them. No code
is run: quantised tensors are numbers with scales, and a program stores its weights as bytes with a JSON table of
contents.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stainlock.errors import FileError
from stainlock.storage.onnx_files import SUFFIX
from stainlock.storage.onnx_weights import onnx_weights
from stainlock.storage.records import parse_json
from stainlock.storage.torchscript import is_torchscript, read_torchscript
from stainlock.storage.values import check_text, check_whole, check_wholes, expect
from stainlock.storage.weights import (
    PYTORCH_SUFFIXES,
    TIED,
    check_stored,
    check_tensors,
    members_of,
    not_weights,
    one_line,
    read_pytorch,
    read_weights,
    unwrap,
)

PROGRAM = ".pt2"
_PACKED = "._packed_params._packed_params"  # under this name PyTorch's 8-bit Linear stores weight and bias as a pair
_CONTENTS = "/data/weights/model_weights_config.json"
# torch.export's codes for the types that weights have.
_FLOATS = {6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16}


def read_deployed(path: str | Path) -> dict[str, Tensor]:
    """The weights by name, with 8-bit layers as floats, in any file that `read_weights` reads, an ONNX file, a
    TorchScript archive or a torch.export program."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == SUFFIX:
        return onnx_weights(path)
    if suffix == PROGRAM and path.is_file():
        return _read_program(path)
    if suffix not in PYTORCH_SUFFIXES or not path.is_file():
        return read_weights(path)
    if is_torchscript(path):
        return read_torchscript(path)
    content = read_pytorch(path)
    state = unwrap(content, _unpacked)
    if state is None:
        raise not_weights(content, path)
    check_tensors(state, path, quantised=True)
    try:
        return {name: (t.dequantize() if t.is_quantized else t).detach() for name, t in state.items()}
    except (RuntimeError, NotImplementedError) as error:  # raised for quantised tensors that make no sense
        raise FileError(f"{path} has quantised tensors that can't be read ({one_line(error)})") from error


def _unpacked(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state dict with packed pairs split into tensors, and without dtype entries."""
    found: dict[Any, Any] = {}
    for name, value in state.items():
        if isinstance(name, str) and name.endswith(_PACKED) and isinstance(value, tuple | list):
            pair = zip(("weight", "bias"), value, strict=False)
            found |= {f"{name.removesuffix(_PACKED)}.{part}": one for part, one in pair if one is not None}
        elif not isinstance(value, torch.dtype):
            found[name] = value
    return found


def _read_program(path: Path) -> dict[str, Tensor]:
    try:
        members = members_of(path)
        check_stored(members, path)
        contents = next((member.filename for member in members if member.filename.endswith(_CONTENTS)), None)
        if contents is None:
            raise FileError(f"{path} is not a torch.export program with its weights: expected {_CONTENTS[1:]} in it")
        state: dict[str, Tensor] = {}
        stored: dict[str, bytearray] = {}  # each is read once, however many names it has
        room = TIED * path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            for name, facts in parse_json(archive.read(contents))["config"].items():
                if (kind := _FLOATS.get(facts["tensor_meta"]["dtype"])) is None:
                    continue
                check_text(facts["path_name"], "path_name")
                place = f"{contents.rpartition('/')[0]}/{facts['path_name']}"
                if place not in stored:
                    stored[place] = bytearray(archive.read(place))
                state[name] = _tensor(name, facts, stored[place], kind)
                room -= state[name].nbytes
                expect(room >= 0, "weights that the file has room for", "more")
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is not a complete torch.export program ({one_line(error)}): get it again") from error
    check_tensors(state, path)
    return state


def _tensor(name: str, facts: Mapping[str, Any], values: bytearray, kind: torch.dtype) -> Tensor:
    """One tensor of the table: its bytes, with the sizes and strides given there."""
    check_text(name, "a weight's name")
    expect(facts["use_pickle"] is False, f"{name} as plain bytes", "a pickle")
    meta = facts["tensor_meta"]
    sizes, strides = ([one["as_int"] for one in meta[part]] for part in ("sizes", "strides"))
    offset = meta["storage_offset"]["as_int"]
    check_wholes(sizes, "sizes")
    check_wholes(strides, "strides")
    check_whole(offset, "storage_offset", 0)
    whole = len(values) // kind.itemsize
    if not math.prod(sizes):
        return torch.zeros(0, dtype=kind)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    expect(last < whole and math.prod(sizes) <= whole, f"{name} within the {whole} numbers that are there", last + 1)
    return torch.frombuffer(values, dtype=kind, count=whole).as_strided(sizes, strides, offset).contiguous()
