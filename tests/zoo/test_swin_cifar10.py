"""The benchmark that trains a small Swin: its data, and interrupted training."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import swin_cifar10
import zoo
import zoo_data
from stainlock import FileError

IMAGES = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 10
SECONDS = 6  # the test clock advances one second per step; an epoch has two steps


def trained(progress: Path, clock: Callable[[], float]) -> dict[str, Tensor]:
    target = swin_cifar10.untrained()
    swin_cifar10.train(target, IMAGES, LABELS, SECONDS, progress, batch_size=8, clock=clock)
    assert not target.model.training
    return target.model.state_dict()


def test_an_interrupted_training_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    ticks = itertools.count()

    def interrupted() -> float:
        if (tick := next(ticks)) == 4:  # in the second epoch
            raise KeyboardInterrupt
        return tick

    expected = trained(tmp_path / "whole", itertools.count().__next__)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", interrupted)
    found = trained(tmp_path / "parts", itertools.count(100).__next__)
    before = swin_cifar10.untrained().model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
    assert any(not torch.equal(before[name], tensor) for name, tensor in expected.items())


def test_the_rate_ends_at_zero_when_the_time_is_up() -> None:
    assert swin_cifar10.rate(0) == 0
    assert swin_cifar10.rate(swin_cifar10.WARM_UP) > 0.95
    assert swin_cifar10.rate(1) == swin_cifar10.rate(1.5) == 0


def test_a_damaged_progress_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "progress").write_bytes(b"no tensors")
    with pytest.raises(FileError, match=r"progress is damaged .* remove it to begin again"):
        trained(tmp_path / "progress", itertools.count().__next__)


def test_a_row_of_the_package_is_an_image(tmp_path: Path) -> None:
    rows = IMAGES.permute(0, 2, 3, 1).reshape(16, 1024, 3).numpy()
    picture = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rows)).save(picture, format="png")
    files = {"test_batch.png": picture.getvalue(), "test_lables.json": json.dumps(LABELS.tolist()).encode()}
    archive = tmp_path / "cifar10.tgz"
    with tarfile.open(archive, "w:gz") as package:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            package.addfile(entry, io.BytesIO(content))
    images, labels = zoo_data.decode_cifar10(archive, "test")
    assert torch.equal(images, IMAGES)
    assert torch.equal(labels, LABELS)
    with pytest.raises(FileError, match=r"cifar10\.tgz is damaged .*data_batch_1"):
        zoo_data.decode_cifar10(archive, "train")


def test_what_is_missing_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(zoo, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", "")
    assert zoo.missing("swin_cifar10") == "swin_cifar10 needs trained weights: run benchmarks/swin_cifar10.py first"
    with pytest.raises(FileError, match=r"^npm is needed once.*Node\.js$"):
        zoo_data.fetch_cifar10(tmp_path)
