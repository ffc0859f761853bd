"""Errors: exit status 2, one clear line on stderr, no traceback, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stainlock.cli import app, main

BASE = "small.py:model"
OUT = ("--out", "new", "--key", "new.key")


def prepared(arguments: list[object], prepare: Callable[[], None] | None = None) -> Any:
    return arguments, prepare


def truncate(path: str) -> Callable[[], None]:
    return lambda: Path(path).write_bytes(Path(path).read_bytes()[:-100]) and None


def flip_a_byte(path: str) -> Callable[[], None]:
    def flip() -> None:
        content = bytearray(Path(path).read_bytes())
        content[-50] ^= 1
        Path(path).write_bytes(content)

    return flip


def nan_weights() -> None:
    state = load_file("stained/model.safetensors")
    state["0.weight"][0, 0, 0, 0] = torch.nan
    save_file(state, "nan.safetensors")


def other_weights() -> None:
    save_file({"somebody.elses": torch.zeros(3)}, "other.safetensors")


def alter_manifest() -> None:
    manifest = json.loads(Path("stained/stainlock.json").read_text())
    Path("stained/stainlock.json").write_text(json.dumps(manifest | {"version": 99}))


def texts() -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("no image")


def damaged_images() -> None:
    Path("damaged").mkdir()
    Path("damaged/a.png").write_text("no image")
    Path("damaged/labels.csv").write_text("file,class_index\na.png,0\n")


BAD = {
    "unknown library model": prepared(["inspect", "torchvision:resnet19", "--weights", "random"]),
    "unknown form": prepared(["inspect", "resnet18"]),
    "no such factory file": prepared(["inspect", "nothing.py:model"]),
    "no such factory": prepared(["inspect", "small.py:modle"]),
    "unknown site": prepared(["stain", BASE, *OUT, "--site", "layer9"]),
    "weights of another model": prepared(["stain", BASE, *OUT, "--weights", "other.safetensors"], other_weights),
    "NaN weights": prepared(["stain", BASE, *OUT, "--weights", "nan.safetensors"], nan_weights),
    "missing weights": prepared(["stain", BASE, *OUT, "--weights", "nowhere.pt"]),
    "data without images": prepared(["evaluate", BASE, "--data", "texts"], texts),
    "empty data": prepared(["evaluate", BASE, "--data", "empty"], lambda: Path("empty").mkdir()),
    "missing data": prepared(["evaluate", BASE, "--data", "nowhere"]),
    "damaged data": prepared(["evaluate", BASE, "--data", "damaged"], damaged_images),
    "verify with empty data": prepared(
        ["verify", "stained", "--key", "owner.key", "--data", "empty"], lambda: Path("empty").mkdir()
    ),
    "truncated key": prepared(["verify", "stained", "--key", "owner.key"], truncate("owner.key")),
    "altered key": prepared(["verify", "stained", "--key", "owner.key"], flip_a_byte("owner.key")),
    "missing key": prepared(["verify", "stained", "--key", "nowhere.key"]),
    "a bundle for a key": prepared(["verify", "stained", "--key", "stained/model.safetensors"]),
    "a folder for a key": prepared(["verify", "stained", "--key", "stained"]),
    "key of another model": prepared(["evaluate", BASE, "--data", "photos", "--key", "owner.key"]),
    "truncated bundle": prepared(["inspect", "stained"], truncate("stained/model.safetensors")),
    "altered bundle": prepared(["inspect", "stained"], flip_a_byte("stained/model.safetensors")),
    "newer bundle": prepared(["inspect", "stained"], alter_manifest),
    "not a bundle": prepared(["inspect", "photos"]),
    "weights for a bundle": prepared(["inspect", "stained", "--weights", "random"]),
    "altered delta": prepared(["apply", BASE, "delta", "--out", "new"], flip_a_byte("delta")),
    "delta for another model": prepared(["apply", "stained", "delta", "--model", BASE, "--out", "new"]),
    "out exists": prepared(["stain", BASE, "--out", "photos", "--key", "new.key"]),
    "key exists": prepared(["stain", BASE, "--out", "new", "--key", "owner.key"]),
    "delta exists": prepared(["stain", BASE, *OUT, "--delta", "delta"]),
    "out within a file": prepared(["stain", BASE, "--out", "small.py/new", "--key", "new.key"]),
    "key within a file": prepared(["stain", BASE, "--out", "new", "--key", "small.py/new.key"]),
    "key inside the bundle": prepared(["stain", BASE, "--out", "new", "--key", "new/owner.key"]),
    "one path for two": prepared(["stain", BASE, "--out", "new", "--key", "new"]),
    "message too long": prepared(["stain", BASE, *OUT, "--schema", "weight", "--message", "x" * 500]),
    "message without schema": prepared(["stain", BASE, *OUT, "--message", "x"]),
    "schema without message": prepared(["stain", BASE, *OUT, "--schema", "weight"]),
    "position outside": prepared(["stain", BASE, *OUT, "--position", "99,99"]),
    "position unreadable": prepared(["stain", BASE, *OUT, "--position", "middle"]),
    "trigger not a PNG": prepared(["stain", BASE, *OUT, "--trigger", "t.jpg"]),
    "trigger of a vector": prepared(["stain", "small.py:vector_model", *OUT, "--trigger", "t.png"]),
    "black box without output schema": prepared(
        ["verify", "stained", "--model", BASE, "--key", "owner.key", "--black-box"]
    ),
    "black box by weights": prepared(["verify", "stained", "--key", "owner.key", "--black-box", "--method", "weights"]),
    "ONNX without black box": prepared(["verify", "m.onnx", "--key", "owner.key"]),
    "missing ONNX": prepared(["verify", "m.onnx", "--key", "owner.key", "--black-box"]),
    "bare weights by response": prepared(
        ["verify", "stained/model.safetensors", "--key", "owner.key", "--method", "response"]
    ),
    "bare weights with data": prepared(
        ["verify", "stained/model.safetensors", "--key", "owner.key", "--data", "photos"]
    ),
    "models of two kinds": prepared(["diff", BASE, "small.py:vector_model"]),
    "missing option": prepared(["stain", BASE, "--out", "new"]),
    "missing argument": prepared(["inspect"]),
    "unknown option": prepared(["inspect", BASE, "--wieghts", "random"]),
    "unknown verb": prepared(["stian", BASE]),
    "not a number": prepared(["inspect", BASE, "--seed", "one"]),
    "demo over a folder of others": prepared(["demo", "--out", "photos"]),
}
NAMED = {
    "unknown library model": "resnet18",
    "no such factory": "it has",
    "unknown site": "layer9",
    "weights of another model": "somebody.elses",
    "NaN weights": "0.weight",
    "message too long": "at most",
    "truncated key": "owner.key",
    "altered key": "altered",
    "altered bundle": "altered",
    "missing option": "--key",
    "out exists": "exists",
    "unknown verb": "stian",
}


def contents(folder: Path) -> dict[str, bytes | None]:
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.mark.parametrize("name", BAD)
def test_one_clear_line_and_nothing_written(run: Any, work: Path, name: str) -> None:
    arguments, prepare = BAD[name]
    text = (work / "small.py").read_text().replace('print("a factory that talks")', "pass")
    (work / "small.py").write_text(text)
    if prepare:
        prepare()
    before = contents(work)
    result = run(*arguments)
    assert result.status == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert NAMED.get(name, "") in result.stderr
    assert contents(work) == before


def test_unexpected_errors_are_one_line_too(run: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake\nof ours")

    monkeypatch.setattr("stainlock.cli.inspect.load_model", broken)
    result = run("inspect", BASE)
    assert result.status == 2
    assert result.stderr == f"error: unexpected ZeroDivisionError: a mistake of ours ({app.DEBUG}=1 shows where)\n"
    monkeypatch.setenv(app.DEBUG, "1")
    assert "Traceback" in run("inspect", BASE).stderr


@pytest.mark.parametrize("failing", ["stainlock.key.Key.save", "stainlock.plan.Plan.save", "os.rename"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_all_outputs_or_none(work: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    before = contents(work)
    monkeypatch.setattr(failing, fail)
    status = main(["stain", BASE, "--out", "new/out", "--key", "keys/k", "--delta", "d", "--quiet"])
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert contents(work) == before


def test_a_rename_that_fails_takes_the_others_back(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    rename, calls = os.rename, []

    def second_fails(*paths: Any) -> None:
        calls.append(paths)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        rename(*paths)

    before = contents(work)
    monkeypatch.setattr("os.rename", second_fails)
    assert main(["stain", BASE, "--out", "new/out", "--key", "keys/k", "--quiet"]) == 2
    assert len(calls) == 2
    assert contents(work) == before
