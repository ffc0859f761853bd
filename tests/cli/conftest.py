"""A small model in a factory file, its stained bundle and key, and tiny folders of images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stainlock.cli import main

FACTORY = """
import torch
from torch import nn
import stainlock as sl

def model():
    print("a factory that talks")
    layers = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )
    return sl.Target(layers, input_shape=(3, 32, 32))

def vector_model():
    return sl.Target(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)), (32,), mean=(0,), std=(1,))
"""


@dataclass
class Result:
    status: int
    stdout: str
    stderr: str

    @property
    def facts(self) -> dict[str, Any]:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        facts: dict[str, Any] = json.loads(self.stdout, parse_constant=refuse)
        return facts


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> Result:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "small.py").write_text(FACTORY)
    base = f"{folder / 'small.py'}:model"
    options = ["--out", f"{folder}/stained", "--key", f"{folder}/owner.key", "--delta", f"{folder}/delta", "--quiet"]
    assert main(["stain", base, *options]) == 0
    noise = np.random.default_rng(0)
    (folder / "photos").mkdir()
    for index in range(4):
        Image.fromarray(noise.integers(0, 256, (40, 48, 3), np.uint8)).save(folder / "photos" / f"{index}.png")
    (folder / "photos" / "labels.csv").write_text("file,class_index\n" + "".join(f"{i}.png,{i}\n" for i in range(4)))
    return folder


@pytest.fixture
def work(_made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: small.py, the bundle `stained`, `owner.key`, `delta` and the folder `photos`."""
    folder = tmp_path / "work"
    shutil.copytree(_made, folder)
    monkeypatch.chdir(folder)
    return folder
