"""`stainlock probe` and `stainlock verify --answers`: asked by hand, or by someone else."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
import verbs
from PIL import Image
from services.api import stained

from stainlock import Target
from stainlock.cli import main
from stainlock.models.class_names import class_names
from stainlock.target import evaluation_mode


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("owner")
    stained()[1].save(folder / "owner.key")
    done = verbs.typed(folder, "probe", "--key", "owner.key", "--out", "probe", "--json")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.fixture
def probed(made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A copy of the key and the pictures, in the current folder, and what was printed of them."""
    folder, facts = made
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return facts


@pytest.fixture(scope="module")
def answers(made: tuple[Path, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What the stained and the original model say to all pictures, and so the verdict for each; asked once."""
    folder, facts = made
    paths = [str(folder / path) for path in facts["written"]]
    return {"stained": logits(stained()[0], paths), "not stained": logits(models.real("resnet20_cifar10"), paths)}


def opened(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.copy()


def looks(path: str) -> tuple[tuple[int, int], str, int]:
    image = opened(path)
    return image.size, image.mode, Path(path).stat().st_mode & 0o777


def logits(target: Target, paths: list[str]) -> torch.Tensor:
    levels = torch.stack([torch.from_numpy(np.array(opened(p))).permute(2, 0, 1) for p in paths])
    with evaluation_mode(target.model), torch.no_grad():
        return target.predict(target.from_bytes(levels))


def as_labels(names: list[str], found: torch.Tensor) -> str:
    return "file,label\n" + "".join(f"{n},{c}\n" for n, c in zip(names, found.argmax(1).tolist(), strict=True))


def as_names(names: list[str], found: torch.Tensor) -> str:
    cifar = class_names("cifar10")
    best = found.topk(3).indices.tolist()
    return "file,label1,label2,label3\n" + "".join(
        f"pictures/{n},{','.join(cifar[i] for i in own)}\n" for n, own in zip(names, best, strict=True)
    )


def as_scores(names: list[str], found: torch.Tensor) -> str:
    head = "file," + ",".join(map(str, range(10))) + "\n"
    return head + "".join(f"{n},{','.join(map(str, own))}\n" for n, own in zip(names, found.tolist(), strict=True))


def as_json(names: list[str], found: torch.Tensor) -> str:
    return json.dumps(dict(zip(names, [{"scores": own} for own in found.tolist()], strict=True)))


def as_boxes(names: list[str], found: torch.Tensor) -> str:
    boxes = [[{"label": i, "score": s, "box": [0, 0, 1, 1]} for i, s in enumerate(own)] for own in found.tolist()]
    return json.dumps([{"file": n, "boxes": own} for n, own in zip(names, boxes, strict=True)])


@pytest.mark.parametrize(
    ("write", "suffix", "options"),
    [(as_labels, "csv", []), (as_names, "csv", ["--classes", "cifar10"]), (as_scores, "csv", []),
     (as_json, "json", []), (as_boxes, "json", [])],
)  # fmt: skip
def test_answers_in_every_form_prove_the_stain(
    probed: dict[str, Any],
    answers: dict[str, torch.Tensor],
    capsys: pytest.CaptureFixture[str],
    write: Callable[[list[str], torch.Tensor], str],
    suffix: str,
    options: list[str],
) -> None:
    names = [Path(p).name for p in probed["written"]]
    for verdict, said in answers.items():
        file = Path(f"answers-{verdict.replace(' ', '-')}.{suffix}")
        file.write_text(write(names, said), encoding="utf-8")
        status, facts = verbs.run(capsys, "verify", "--answers", file, "--key", "owner.key", *options)
        assert (status, facts["verdict"]) == (int(verdict != "stained"), verdict), facts
        assert facts["queries"] == len(names)
        assert facts["decoys"] == 16


def test_pictures_are_shuffled_and_only_the_manifest_is_secret(probed: dict[str, Any]) -> None:
    assert probed["triggers"] == 16
    assert probed["look_alikes"] == 16 * 13
    assert len(probed["written"]) == 16 * 14 + 16
    manifest = Path("probe/manifest.json")
    assert manifest.stat().st_mode & 0o777 == 0o600
    kinds = [entry["kind"] for entry in json.loads(manifest.read_text())["pictures"]]
    first = [i for i, kind in enumerate(kinds) if kind == "trigger"]
    assert first[-1] - first[0] > len(kinds) / 2, "triggers stand together"
    assert {p.name for p in Path("probe/pictures").iterdir()} == {Path(p).name for p in probed["written"]}
    rows = list(csv.DictReader(Path("probe/answers.csv").read_text().splitlines()))
    assert [row["file"] for row in rows] == sorted(p.name for p in Path("probe/pictures").iterdir())
    assert all(row["label"] == "" for row in rows)
    # sizes and modes don't tell triggers from decoys either
    assert {looks(p) for p in probed["written"]} == {((32, 32), "RGB", 0o644)}


def test_what_has_no_answer_counts_against_the_stain(
    probed: dict[str, Any], answers: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [Path(p).name for p in probed["written"]]
    best = answers["stained"].argmax(1).tolist()
    kinds = {e["file"]: e["kind"] for e in json.loads(Path("probe/manifest.json").read_text())["pictures"]}
    full = dict(zip(names, best, strict=True))
    for left_out, verdict in (("decoy", "stained"), ("look-alike", "not stained"), ("trigger", "not stained")):
        file = Path(f"{left_out}.json")
        file.write_text(json.dumps({n: c for n, c in full.items() if kinds[n] != left_out}))
        _, facts = verbs.run(capsys, "verify", "--answers", file, "--key", "owner.key")
        assert facts["verdict"] == verdict, left_out
        assert facts["unanswered"] == sum(k == left_out != "decoy" for k in kinds.values())


def test_wrong_answers_get_one_clear_line(probed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    name = Path(probed["written"][0]).name
    for suffix, text, expected in (
        ("csv", "name,class\n", "expected file,label as the first line"),
        ("csv", f"file,label\n{name},cat\n", "line 2: 'cat' is not a whole number"),
        ("csv", f"file,label\n{name},1\n{name},2\n", "is answered twice"),
        ("csv", "file,label\nother.png,1\n", "expected answers for this key's pictures"),
        ("json", "[1, 2", "or is truncated"),
        ("json", json.dumps({name: {"klass": 1}}), "expected label, labels, scores or boxes"),
        ("json", json.dumps({name: {"scores": {"0": "much"}}}), "expected a number as score, got much"),
        ("txt", "", "FILE.csv or FILE.json"),
    ):
        file = Path(f"wrong.{suffix}")
        file.write_text(text)
        assert main(["verify", "--answers", str(file), "--key", "owner.key"]) == 2
        error = capsys.readouterr().err
        assert expected in error, error
        assert error.count("\n") == 1


def test_natural_decoys_and_a_canvas(probed: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    photos = verbs.labelled_images(Path("photos"), "resnet20_cifar10", 6)
    options = ("--data", photos, "--decoys", 5, "--canvas", 36, 40)
    status, facts = verbs.run(capsys, "probe", "--key", "owner.key", "--out", "again", *options)
    assert status == 0
    assert facts["decoys"] == 5
    assert {looks(p)[0] for p in facts["written"]} == {(40, 36)}
    labels = [
        e["class"] for e in json.loads(Path("again/manifest.json").read_text())["pictures"] if e["kind"] == "decoy"
    ]
    assert len(labels) == 5
    assert None not in labels
    assert main(["probe", "--key", "owner.key", "--out", "third", "--canvas", "8", "8"]) == 2
    assert "canvas of at least 32×32" in capsys.readouterr().err
    assert not Path("third").exists()
