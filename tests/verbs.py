"""Running verbs of the command line inside a test, and folders of images for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
from PIL import Image

import zoo
from stainlock.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path | int) -> tuple[int, dict[str, Any]]:
    """The exit status and the JSON that a verb prints."""
    status = main([*map(str, arguments), "--json"])
    printed = capsys.readouterr().out
    return status, json.loads(printed) if printed else {}


def labelled_images(folder: Path, name: str, count: int) -> Path:
    """A new folder of so many natural images for a model of the zoo, with labels.csv."""
    models.real(name)
    pixels, labels = zoo.natural(name, count)
    assert labels is not None
    folder.mkdir()
    lines = ["file,class_index"]
    for i, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
