"""The weights in a TorchScript archive, read without running any of it.

An archive is a zip file: code, raw numbers, and a pickle that says which numbers belong to which module. PyTorch itself
runs the archive's code when it loads one. Here the pickle is read with stand-ins: every class it names becomes a bag of
values, the few functions it may call record a tensor's place among the numbers, and any other name is refused. The
result is a tree of plain values, whose tensors are then read from the numbers.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stainlock.errors import FileError
from stainlock.storage.files import MOST_TENSORS
from stainlock.storage.values import check_number, check_text, check_whole, check_wholes, expect
from stainlock.storage.weights import TIED, is_zip, members_of, one_line

_TREES = (("data.pkl", "data"), ("constants.pkl", "constants"))  # modules; constants, to which freezing turns weights
_TYPES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "DoubleStorage": torch.float64,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "QInt8Storage": torch.int8, "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32,
}  # fmt: skip
_LONGEST_TREE = 2**26  # bytes of a pickle, which has modules and places but no numbers
_DEEPEST = 200  # levels of nested modules


def is_torchscript(path: Path) -> bool:
    """Whether a file is a TorchScript archive, by the names of its members."""
    if not path.is_file() or not is_zip(path):
        return False
    names = {member.filename.partition("/")[2] for member in members_of(path)}
    return "constants.pkl" in names and any(name.startswith("code/") for name in names)


def read_torchscript(path: Path) -> dict[str, Tensor]:
    """The tensors of an archive by their names in its modules, 8-bit ones as floats."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(archive, path.stat().st_size)
    except Exception as error:  # a pickle's instructions can fail in any way
        raise FileError(f"{path} is not a complete TorchScript archive ({one_line(error)}): get it again") from error


def _read(archive: zipfile.ZipFile, size: int) -> dict[str, Tensor]:
    numbers = _Numbers(archive, size)
    found: dict[str, Tensor] = {}
    room = TIED * size
    for tree, folder in _TREES:
        for name, place in _places(_Reader(io.BytesIO(numbers.tree(tree))).load()):
            tensor = numbers.tensor(folder, place)
            room -= tensor.nbytes
            expect(room >= 0 and len(found) < MOST_TENSORS, "tensors that the file has room for", "more")
            while name in found:  # an entry of a list may have the name of a module
                name += "'"
            found[name] = tensor
    return found


@dataclass(frozen=True)
class _Place:
    """Where a tensor is among the numbers of a storage, and the scale and zero point of an 8-bit one."""

    key: str
    kind: torch.dtype
    offset: int
    sizes: Sequence[int]
    strides: Sequence[int]
    scale: tuple[Any, ...] | None = None


class _Numbers:
    """The numbers of an archive; each member is read once, however many tensors it contains."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive, self._size = archive, size
        self._members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        self._read: dict[str, bytearray] = {}

    def tree(self, name: str) -> bytes:
        expect(name in self._members, f"{name} in it", "none")
        expect(self._members[name].file_size <= _LONGEST_TREE, f"{name} of at most {_LONGEST_TREE} bytes", "more")
        return self._archive.read(self._members[name])

    def tensor(self, folder: str, place: _Place) -> Tensor:
        values = self._storage(f"{folder}/{place.key}")
        count = len(values) // place.kind.itemsize
        if not math.prod(place.sizes):
            return torch.zeros(0)
        last = place.offset + sum((n - 1) * step for n, step in zip(place.sizes, place.strides, strict=True))
        expect(last < count and math.prod(place.sizes) <= count, f"a tensor within {count} numbers", last + 1)
        whole = torch.frombuffer(values, dtype=place.kind, count=count)
        tensor = whole.as_strided(tuple(place.sizes), tuple(place.strides), place.offset).contiguous()
        return tensor if place.scale is None else self._scaled(folder, tensor.float(), *place.scale)

    def _storage(self, name: str) -> bytearray:
        if name not in self._read:
            member = self._members[name]
            stored = member.compress_type == zipfile.ZIP_STORED and member.file_size <= self._size
            expect(stored, "numbers as they are", f"{name} compressed")
            self._read[name] = bytearray(self._archive.read(member))
        return self._read[name]

    def _scaled(self, folder: str, tensor: Tensor, kind: str, scale: Any, zero: Any, axis: Any = 0) -> Tensor:
        if kind == "per_tensor_affine":
            check_number(scale, "a scale")
            check_number(zero, "a zero point")
            return tensor.sub(zero).mul(scale)
        check_whole(axis, "axis", 0, tensor.dim() - 1)
        shape = [-1 if i == axis else 1 for i in range(tensor.dim())]
        numbers = []
        for given in (zero, scale):
            expect(isinstance(given, _Place) and given.scale is None, "a tensor of scales", type(given).__name__)
            own = self.tensor(folder, given).float()
            expect(own.shape == tensor.shape[axis : axis + 1], f"{tensor.shape[axis]} scales", tuple(own.shape))
            numbers.append(own.view(shape))
        return tensor.sub(numbers[0]).mul(numbers[1])


class _Bag:
    """Stand-in for any class the archive names: it keeps the object's state."""

    def __init__(self) -> None:
        self.values: Any = None

    def __setstate__(self, state: Any) -> None:
        self.values = state


class _Named:
    """Stand-in for a function or constant; calling it returns plain values."""

    __slots__ = ("_call", "name")

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        self.name, self._call = name, call

    def __call__(self, *given: Any) -> Any:
        if self._call is None:
            raise pickle.UnpicklingError(f"it calls {self.name}")
        return self._call(*given)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"it changes {self.name}")


class _Reader(pickle._Unpickler):
    """A pickle reader on top of Python's own implementation: the one in C trusts the sizes that a file states."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _Bag
        known: dict[tuple[str, str], Callable[..., Any] | None] = {
            ("torch._utils", "_rebuild_tensor_v2"): _plain,
            ("torch._utils", "_rebuild_qtensor"): _eight_bit,
            ("collections", "OrderedDict"): lambda *_: {},
            ("torch", "per_tensor_affine"): None,
            ("torch", "per_channel_affine"): None,
        }
        if module == "torch.jit._pickle":  # lists tagged with their type
            return _Named(name, lambda *given: given[0] if given else None)
        if (module, name) in known:
            return _Named(name, known[module, name])
        if module == "torch" and name in _TYPES:
            return _Named(name)
        raise pickle.UnpicklingError(f"it names {one_line(ValueError(f'{module}.{name}'))}")

    def persistent_load(self, given: Any) -> Any:
        word, kind, key, *_ = given
        expect(word == "storage" and isinstance(kind, _Named), "a storage", word)
        check_text(key, "a storage's name")
        return key, _TYPES[kind.name]


def _plain(storage: tuple[str, torch.dtype], offset: Any, sizes: Any, strides: Any, *_: Any) -> _Place:
    key, kind = storage
    check_whole(offset, "offset", 0)
    check_wholes(sizes, "sizes")
    check_wholes(strides, "strides")
    return _Place(key, kind, offset, tuple(sizes), tuple(strides))


def _eight_bit(storage: Any, offset: Any, sizes: Any, strides: Any, scale: Any, *_: Any) -> _Place:
    plain = _plain(storage, offset, sizes, strides)
    kind, *rest = scale
    expect(isinstance(kind, _Named) and len(rest) in (2, 3), "scales", type(kind).__name__)
    return _Place(plain.key, plain.kind, plain.offset, plain.sizes, plain.strides, (kind.name, *rest))


def _places(tree: Any) -> Iterator[tuple[str, _Place]]:
    """Every tensor in a tree of bags, dicts and lists, each object once, with the names on the path to it."""
    seen: set[int] = set()
    left: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    while left:
        way, value = left.pop()
        if isinstance(value, _Place):
            yield ".".join(way) or "tensor", value
            continue
        inner = value.values if isinstance(value, _Bag) else value
        if not isinstance(inner, dict | list | tuple) or id(inner) in seen or len(way) > _DEEPEST:
            continue
        seen.add(id(inner))
        entries = inner.items() if isinstance(inner, dict) else enumerate(inner)
        left += reversed([((*way, str(name)[:100]), entry) for name, entry in entries])
