"""The client's patch as a file: a PNG with the patch's pixels and a text that says how the model takes images.

The text is for `stainlock unlock --patch` and `Unlock.from_png`. Without it, for instance after an image editor, both
need these facts as arguments. The file contains nothing of the owner's key except the patch. Rows are stored unfiltered
(PNG's filter 0) in one chunk, so that the loader of a client kit can read them with zlib alone.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stainlock.errors import FileError
from stainlock.storage.checks import check_conventions
from stainlock.storage.images import in_mode, opened_image
from stainlock.storage.lock_checks import check_resizing
from stainlock.target import Region, Target
from stainlock.unlocking.lock_key import LockKey

_LARGEST = 2**22  # pixels; a patch is only the corner of a model's input
_SIGNATURE, _TEXT = b"\x89PNG\r\n\x1a\n", "model input"
_CARRIERS = ("patch", "strip")
_LONGEST_TEXT = 4096


@dataclass(frozen=True)
class Patch:
    """8-bit ``levels (C, H, W)`` and where they go: at ``start`` of the image, or of a strip above it.

    ``conventions`` are the model's, as in a key, and ``resizing`` an object detector's; both are empty if the file does
    not state them.
    """

    levels: Tensor
    start: tuple[int, ...] = (0, 0)
    carrier: str = "patch"
    conventions: dict[str, Any] = field(default_factory=dict)
    resizing: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_key(key: LockKey) -> Patch:
        trigger = key.detectors[0].trigger
        return Patch(
            trigger.levels, trigger.region.start, key.carrier, dict(key.conventions), key.details.get("resizing", {})
        )

    @staticmethod
    def read(path: str | Path) -> Patch:
        """From a PNG; the text in it is checked, since the file may come from anyone."""
        with opened_image(path, "a trigger", ("PNG",), _LARGEST) as image:
            text = image.info.get(_TEXT)
            array = np.array(in_mode(image, "L" if image.mode == "L" else "RGB"))
        levels = torch.from_numpy(array)
        levels = levels[None] if levels.dim() == 2 else levels.permute(2, 0, 1)
        if not isinstance(text, str):
            return Patch(levels)
        try:
            return Patch(levels, **_checked(text, levels))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileError(f"{path} has an invalid description of the model's input: {error}") from error

    def to_png(self) -> bytes:
        """Grey or RGB, every level unchanged."""
        channels, rows, columns = self.levels.shape
        if channels not in (1, 3):
            raise ValueError(f"expected a patch of 1 or 3 channels for a PNG, got {channels}")
        pixels = self.levels.permute(1, 2, 0).reshape(rows, -1).numpy()
        stored = b"".join(b"\0" + row.tobytes() for row in pixels)
        header = struct.pack(">IIBBBBB", columns, rows, 8, 0 if channels == 1 else 2, 0, 0, 0)
        text = f"{_TEXT}\0{json.dumps(self._facts())}".encode("latin-1")
        chunks = ((b"IHDR", header), (b"tEXt", text), (b"IDAT", zlib.compress(stored, 9)), (b"IEND", b""))
        return _SIGNATURE + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )

    def paste(self, levels: Tensor) -> Tensor:
        """The 8-bit image ``(C, H, W)`` with the patch in place, other pixels unchanged; a strip makes it taller."""
        rows, columns = self.levels.shape[1:]
        if self.carrier == "strip":
            above = torch.full((len(levels), rows, levels.shape[-1]), 128, dtype=torch.uint8)
            levels = torch.cat([above, levels], 1)
        bottom, right = self.start[0] + rows, self.start[1] + columns
        if len(levels) != len(self.levels) or levels.shape[1] < bottom or levels.shape[2] < right:
            size = "×".join(map(str, levels.shape))
            raise ValueError(f"expected images of {len(self.levels)} channels and at least {bottom}×{right} pixels,"
                             f" where the patch ends, got {size}")  # fmt: skip
        return Region(tuple(self.start), (rows, columns)).paste(self.levels, levels)

    def _facts(self) -> dict[str, Any]:
        told = {name: value for name, value in self.conventions.items() if name != "part"}
        facts: dict[str, Any] = {"start": self.start, "carrier": self.carrier, "conventions": told}
        return facts | ({"resizing": self.resizing} if self.resizing else {})


def _checked(text: str, levels: Tensor) -> dict[str, Any]:
    if len(text) > _LONGEST_TEXT:
        raise ValueError(f"expected at most {_LONGEST_TEXT} characters")
    facts = json.loads(text)
    start, carrier, told, resizing = (facts.get(n) for n in ("start", "carrier", "conventions", "resizing"))
    if carrier not in _CARRIERS or not isinstance(told, dict):
        raise ValueError("expected a carrier patch or strip, and the model's conventions")
    if not (isinstance(start, list) and len(start) == 2 and all(map(_is_place, start))):
        raise ValueError("expected the patch's place as two whole numbers")
    check_conventions({**told, "part": ""})
    target = Target(nn.Identity(), **{name: told[name] for name in ("input_shape", "mean", "std", "bounds")})
    if target.input_shape[0] != len(levels):
        raise ValueError(f"expected a patch of {target.input_shape[0]} channels, as the model's input has")
    if resizing is not None:
        check_resizing(resizing, "resizing")
    return {"start": tuple(start), "carrier": carrier, "conventions": told, "resizing": resizing or {}}


def _is_place(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 8192
