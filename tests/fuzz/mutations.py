"""Ways to spoil a file: its bytes, or what they say, with every checksum right again."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from stainlock.storage.files import _checksum

_LONG = "x" * 5000
_DEEP: list[Any] = []
for _ in range(40):
    _DEEP = [_DEEP]
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 255, 2**16, 2**31, 2**48, 2**63, 2**64, 10**400, -(2**63), 0.0, -0.0, 0.5,
    1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), "", "a", "0", "1e400", "\x00", "\ud800",
    "\x1b[2J", "١٢", "../..", "None", _LONG, [], [0], [-1], [2**70], [None], [[]], [1.5, "a"], [1] * 20,
    {}, {"a": 1}, {"": None}, _DEEP,
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


def spoil_bytes(content: bytes, random: Random) -> bytes:
    """Damage: what disks, networks and clumsy hands do."""
    found = bytearray(content)
    for _ in range(random.randint(1, 4)):
        kind, size = random.randint(0, 5), len(found)
        a, b = sorted(random.randint(0, size) for _ in range(2))
        if kind == 0:
            del found[a:]
        elif kind == 1 and size:
            found[random.randrange(size)] = random.randint(0, 255)
        elif kind == 2:
            del found[a : min(b, a + 64)]
        elif kind == 3:
            found[a:a] = found[a : min(b, a + 4096)]
        elif kind == 4:
            found[a : a + 8] = random.choice([bytes(8), b"\xff" * 8, (2**40).to_bytes(8, "little")])
        else:
            found[:16] = bytes(random.randint(0, 255) for _ in range(16))
    return bytes(found)


def places(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in JSON, as the names and numbers that lead there."""
    found = [above] if above else []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value[:8]))
    else:
        inner = []
    return found + [place for name, part in inner for place in places(part, (*above, name))]


def spoil_json(facts: Any, random: Random) -> Any:
    """Well-formed, and wrong: other values, missing and surplus ones, ones from elsewhere, long lists."""
    facts = copy.deepcopy(facts)
    for _ in range(random.randint(1, 3)):
        known = places(facts)
        if not known:
            return _odd(random)
        *way, last = random.choice(known)
        parent = facts
        for name in way:
            parent = parent[name]
        kind, value = random.randint(0, 7), parent[last]
        if kind == 0:
            del parent[last]
        elif kind == 1 and isinstance(parent, dict):
            parent[random.choice(["new", "", "version", "kind", "x" * 300])] = _odd(random)
        elif kind == 2 and isinstance(value, list):
            parent[last] = copy.deepcopy(value * random.choice([0, 2, 100]))
        elif kind == 3 and isinstance(value, int | float) and not isinstance(value, bool):
            parent[last] = random.choice(
                [-value, value + 1, value * 1000, str(value), value * 0, value - 0.5 if abs(value) < 1e9 else 0.5]
            )
        elif kind == 4:
            source: Any = facts
            for name in random.choice(known):
                source = source[name] if isinstance(source, dict | list) and _has(source, name) else source
            parent[last] = copy.deepcopy(source)
        elif kind == 5 and isinstance(value, str):
            parent[last] = random.choice(
                [value.upper(), value + " ", value[::-1], value[:-1], value * 50, value + "\n"]
            )
        else:
            parent[last] = _odd(random)
    return facts


def _odd(random: Random) -> Any:
    """A copy, which later changes may change."""
    return copy.deepcopy(random.choice(ODD))


def _has(value: Any, name: Any) -> bool:
    return name in value if isinstance(value, dict) else isinstance(name, int) and name < len(value)


def spoil_tensors(tensors: dict[str, Tensor], random: Random) -> dict[str, Tensor]:
    """Other shapes, types, names and numbers."""
    found = dict(tensors)
    for _ in range(random.randint(1, 3)):
        if not found:
            return {"odd": torch.ones(3)}
        name = random.choice(sorted(found))
        tensor, kind = found[name], random.randint(0, 8)
        if kind == 0:
            del found[name]
        elif kind == 1:
            found[name] = tensor.to(random.choice(DTYPES))
        elif kind == 2:
            found[name] = tensor.flatten()[: random.randint(0, 4)].clone()
        elif kind == 3:
            found[name] = tensor[None] if random.randint(0, 1) else tensor.flatten()
        elif kind == 4 and tensor.numel():
            if tensor.is_floating_point():
                odd: list[Any] = [0.0, -1.0, 1e30, float("nan"), float("inf")]
            else:
                odd = [0, -1, 5, 2**40] if tensor.dtype.itemsize == 8 else [0, 1]
            tensor = tensor.clone()
            tensor.view(-1)[random.randrange(tensor.numel())] = random.choice(odd)
            found[name] = tensor
        elif kind == 5:
            found[random.choice(["odd", name + ".0", "0.values", "detector.1", "trigger.1", ""])] = tensor.clone()
        elif kind == 6:
            found[name] = torch.zeros(random.choice([(0,), (0, 5), (1,), (3, 1, 1), (2,) * 12])).to(tensor.dtype)
        elif kind == 7:
            found[name] = found[random.choice(sorted(found))].clone()
        else:
            found[name] = -tensor if tensor.dtype not in (torch.bool, torch.uint8) else tensor.clone()
    return found


def spoil_packed(content: bytes, kind: str, random: Random) -> bytes:
    """A file of `pack` with other facts or tensors, and a right checksum."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    facts, tensors, version = json.loads(header["facts"]), load(content), int(header["version"])
    if random.randint(0, 2):
        facts = spoil_json(facts, random)
    if not random.randint(0, 2):
        tensors = spoil_tensors(tensors, random)
    if not random.randint(0, 9):
        version = random.choice([1, 2, 3])
    return packed(kind, version, facts, tensors)


def packed(kind: str, version: int, facts: Any, tensors: dict[str, Tensor]) -> bytes:
    """As `pack` does it, but whatever the facts are: halves of characters are written as escapes."""
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"format": f"stainlock-{kind}", "version": str(version), "facts": json.dumps(facts)}
    return save(stored, metadata | {"checksum": _checksum(metadata, stored)})
