"""Running verbs of the command line inside a test, and folders of images for them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
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


def typed(folder: Path, *arguments: str | Path | int, own_process: bool = False) -> subprocess.CompletedProcess[str]:
    """What a command prints, typed in a folder; in this process, as starting one of its own takes seconds."""
    given = [str(argument) for argument in arguments]
    if own_process:
        program = "import sys; from stainlock.cli import main; sys.exit(main())"
        return subprocess.run(
            [sys.executable, "-c", program, *given],
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )  # fmt: skip
    with (
        pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err,
    ):  # fmt: skip
        patch.setenv("COLUMNS", "200")
        status = main(given)
    return subprocess.CompletedProcess(given, status, out.getvalue(), err.getvalue())


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
