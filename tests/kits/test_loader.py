"""A kit's load.py, run as a client runs it, with a weight file: what it reads and what it refuses."""

from __future__ import annotations

import dataclasses
import shutil
import struct
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import pytest
import torch

import stainlock as sl
from stainlock import Key, Target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Target, Key, Path]:
    base = dataclasses.replace(models.conv_net(), bounds=(-1.0, 1.0))
    locked, key = sl.lock(base, seed=1)
    folder = tmp_path_factory.mktemp("kits") / "kit"
    sl.client_kit(locked, folder, key=key, format="safetensors")
    return base, locked, key, folder


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kit's load.py, imported as by a program in the same folder."""
    monkeypatch.syspath_prepend(str(folder))
    for name in ("load", "gates"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import load  # type: ignore[import-not-found]

    found: ModuleType = load
    for name in ("load", "gates"):
        sys.modules.pop(name, None)
    return found


def test_a_client_gets_the_unlocked_outputs(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, locked, key, folder = made
    pixels = 2 * torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) - 1
    before = pixels.clone()
    run = loaded(folder, monkeypatch).load(base.copy().model)
    with torch.no_grad():
        assert torch.allclose(run(pixels), locked(key.unlock(pixels)), atol=1e-5)
    assert torch.equal(pixels, before)


def test_the_patch_is_read_to_the_last_level(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, key, folder = made
    levels = key.detectors[0].trigger.levels
    assert torch.allclose(loaded(folder, monkeypatch).patch(), levels * (2 / 255) - 1, atol=1e-6)


def test_a_patch_that_another_program_saved_is_refused(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filtered rows are stored as differences, which must not be read as levels."""
    folder = made[3]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    png = (tmp_path / "patch.png").read_bytes()
    columns, rows = struct.unpack(">II", png[16:24])
    start = png.index(b"IDAT")
    length = int.from_bytes(png[start - 4 : start], "big")
    stored = bytearray(zlib.decompress(png[start + 4 : start + 4 + length]))
    stored[:: 3 * columns + 1] = bytes([1] * rows)  # PNG's filter "sub"
    data = b"IDAT" + zlib.compress(bytes(stored))
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    (tmp_path / "patch.png").write_bytes(png[: start - 4] + chunk + png[start + 8 + length :])
    with pytest.raises(ValueError, match="was re-saved by another program"):
        loaded(tmp_path, monkeypatch).patch()
