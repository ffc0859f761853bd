"""Files for clients: `lock --client`, `stain --client`, `unlock --patch`, `export`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import Run
from PIL import Image

BASE = "small.py:model"


def picture(path: str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


@pytest.fixture
def locked(run: Run, work: Path) -> Path:
    made = run("lock", BASE, "--out", "locked", "--key", "lock.key", "--client", "kit", "--format", "safetensors",
               "--trigger", "client.png", "--json")  # fmt: skip
    assert made.status == 0, made.stderr
    assert made.facts["client"] == "kit"
    assert made.facts["format"] == "safetensors"
    assert made.facts["max_difference"] == 0
    return work


def test_a_lock_writes_a_kit_beside_the_bundle(run: Run, locked: Path) -> None:
    names = {path.name for path in (locked / "kit").iterdir()}
    assert names == {"README.txt", "gates.py", "load.py", "model.safetensors", "patch.png"}
    assert (locked / "kit" / "patch.png").read_bytes() == (locked / "client.png").read_bytes()


def test_a_patch_does_what_the_key_does(run: Run, locked: Path) -> None:
    by_key = run("unlock", "photos/0.png", "photos/1.png", "--key", "lock.key", "--out", "by-key", "--json")
    by_patch = run("unlock", "photos/0.png", "photos/1.png", "--patch", "client.png", "--out", "by-patch", "--json")
    assert by_key.status == by_patch.status == 0
    assert by_patch.facts == {"written": ["by-patch/0.png", "by-patch/1.png"]}
    for name in ("0.png", "1.png"):
        assert np.array_equal(picture(f"by-key/{name}"), picture(f"by-patch/{name}"))


def test_a_patch_that_was_saved_anew_needs_the_size(run: Run, locked: Path) -> None:
    Image.fromarray(picture("client.png")).save("plain.png")
    told = run("unlock", "photos/0.png", "--patch", "plain.png", "--out", "own-size")
    assert told.status == 0
    assert "--input-size sets it" in told.stderr
    assert picture("own-size/0.png").shape == picture("photos/0.png").shape
    assert run("unlock", "photos/0.png", "--patch", "plain.png", "--input-size", "32x32", "--out", "out").status == 0
    assert run("unlock", "photos/0.png", "--key", "lock.key", "--out", "by-key").status == 0
    assert np.array_equal(picture("out/0.png"), picture("by-key/0.png"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "o"], "expected either --key FILE, the owner's, or --patch FILE.png, the client's"),
        (["--patch", "none.png", "--out", "o"], "none.png does not exist: expected the client's patch"),
        (["--patch", "lock.key", "--out", "o"], "lock.key can't be read as a trigger"),
        (["--patch", "client.png", "--input-size", "64x64", "--out", "o"], "inputs of 32×32: leave out --input-size"),
        (["--key", "lock.key", "--input-size", "64x64", "--out", "o"], "the key knows the model's input size"),
    ],
)
def test_unlock_is_told_what_is_wrong(run: Run, locked: Path, arguments: list[str], message: str) -> None:
    told = run("unlock", "photos/0.png", *arguments)
    assert (told.status, told.stdout) == (2, "")
    assert message in told.stderr
    assert not Path("o").exists()


def test_a_stain_s_kit_says_nothing_of_it(run: Run, work: Path) -> None:
    made = run("stain", BASE, "--out", "out", "--key", "k", "--client", "kit", "--format", "safetensors", "--json")
    assert made.status == 0
    assert {path.name for path in Path("kit").iterdir()} == {"README.txt", "load.py", "model.safetensors"}
    text = Path("kit/README.txt").read_text() + Path("kit/load.py").read_text()
    assert "stain" not in text
    assert run("verify", "kit/model.safetensors", "--key", "k").status == 0


def test_format_is_for_a_kit(run: Run, work: Path) -> None:
    told = run("stain", BASE, "--out", "out", "--key", "k", "--format", "onnx")
    assert told.status == 2
    assert "expected --client DIR with --format onnx" in told.stderr


def test_export_says_how_close_it_is(run: Run, work: Path) -> None:
    made = run("export", "stained", "--model", BASE, "--out", "model.pt2", "--json")
    assert made.status == 0
    facts = json.loads(made.stdout)
    assert (facts["out"], facts["format"]) == ("model.pt2", "torch-export")
    assert facts["max_difference"] <= 1e-5
    assert run("export", "stained", "--model", BASE, "--out", "m.bin").status == 2
    weights = run("export", "stained", "--model", BASE, "--out", "w", "--format", "safetensors", "--json")
    assert weights.facts["max_difference"] == 0
