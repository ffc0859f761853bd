"""The runner: rows that survive an interrupt, tables, and one line where something can't be done."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import stainlock.attacks as attacks
import zoo
from stainlock import Key, Target, lock, stain
from stainlock.attacks import Attack, Attacked, NotApplicable, Subject
from stainlock.attacks.rows import ROWS, Row, append_row, read_rows
from stainlock.attacks.run import attack
from stainlock.errors import FileError
from stainlock.evaluation import Tensors

FEW = ["fp16", "perturb"]


@pytest.fixture(scope="module")
def protected() -> tuple[Target, Key]:
    return stain(models.conv_net(), seed=1, steps=8)


@pytest.fixture
def data() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return Tensors(torch.rand(12, 3, 16, 16, generator=generator), [i % 10 for i in range(12)])


@pytest.fixture
def extra(monkeypatch: pytest.MonkeyPatch) -> dict[str, Attack]:
    """A registry that a test may add to."""
    known = dict(attacks.all_attacks())
    monkeypatch.setattr("stainlock.attacks.run.all_attacks", lambda: known)
    return known


def run(protected: tuple[Target, Key], data: Any, names: Any, **options: Any) -> list[Row]:
    return attack(*protected, data, names, decoys=24, **options)


def test_a_row_tells_everything(protected: tuple[Target, Key], data: Tensors, tmp_path: Path) -> None:
    rows = run(protected, data, FEW, out=tmp_path / "out")
    assert [row.attack for row in rows] == ["none", "fp16", *["perturb"] * 5]
    first = rows[0]
    assert first.verdict == "stained"
    assert set(first.by) == {"weights", "response"}
    assert first.trigger_response == pytest.approx(1, abs=1e-3)
    assert first.performance is not None
    assert first.p_value is not None
    assert first.p_value < 1e-20
    assert rows[-1].trigger_response < 1  # type: ignore[operator]
    assert {"delta", "bound", "observed"} <= set(rows[-1].figures)
    written = list(csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines()))
    assert [row["strength"] for row in written] == [str(row.strength) for row in rows]
    facts = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert {"attack", "strength", "verdict", "p_value", "trigger_response", "performance"} <= set(facts[0])
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_where_it_was_interrupted(
    protected: tuple[Target, Key], data: Tensors, tmp_path: Path, extra: dict[str, Attack]
) -> None:
    def interrupt(subject: Subject, strength: object) -> Attacked:
        raise KeyboardInterrupt

    made: list[str] = []

    def told(row: Row) -> None:
        made.append(row.attack)

    one = extra["fp16"]
    extra["broken"] = replace(one, name="broken", run=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(protected, data, ["fp16", "broken"], out=tmp_path, finished=told)
    assert made == ["none", "fp16"]
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"attack": "perturb", "stren')  # what a power cut leaves
    extra["broken"] = replace(one, name="broken")
    rows = run(protected, data, ["fp16", "broken"], out=tmp_path, finished=told)
    assert made == ["none", "fp16", "broken"]
    assert [row.attack for row in rows] == ["none", "fp16", "broken"]
    assert [row.attack for row in read_rows(tmp_path)] == ["none", "fp16", "broken"]
    run(protected, data, ["fp16"], out=tmp_path, finished=told, seed=1)  # other images: another row
    assert made[3:] == ["none", "fp16"]


def test_a_row_that_did_not_apply_is_tried_again(
    protected: tuple[Target, Key], data: Tensors, tmp_path: Path, extra: dict[str, Attack]
) -> None:
    def refuse(subject: Subject, strength: object) -> Attacked:
        raise NotApplicable("needs a package")

    def fail(subject: Subject, strength: object) -> Attacked:
        raise RuntimeError("shapes\ndiffer")

    extra["odd"] = Attack("odd", "thief", ("stain",), "nothing", (1,), refuse)
    row = run(protected, data, ["odd"], out=tmp_path)[-1]
    assert (row.applied, row.note, row.performance) == (False, "needs a package", None)
    extra["odd"] = replace(extra["odd"], run=fail)
    assert run(protected, data, ["odd"], out=tmp_path)[-1].note == "failed: RuntimeError: shapes differ"
    extra["odd"] = replace(extra["odd"], run=lambda subject, strength: Attacked())
    assert run(protected, data, ["odd"], out=tmp_path)[-1].applied


def test_data_without_labels(protected: tuple[Target, Key], data: Tensors) -> None:
    rows = run(protected, Tensors(data.pixels), ["fine-tune-last", "fp16"])
    by_name = {row.attack: row for row in rows}
    assert "labels.csv" in by_name["fine-tune-last"].note
    assert by_name["fp16"].performance is None
    assert by_name["fp16"].verdict == "stained"


def test_thief_and_owner_have_no_image_in_common(
    protected: tuple[Target, Key], data: Tensors, extra: dict[str, Attack]
) -> None:
    seen: list[torch.Tensor] = []
    evaluated: list[torch.Tensor] = []

    def look(subject: Subject, strength: object) -> Attacked:
        assert subject.images is not None
        seen.append(subject.images)
        return Attacked(unlock=lambda pixels: evaluated.append(pixels) or pixels)  # type: ignore[func-returns-value]

    extra["look"] = Attack("look", "thief", ("stain",), "images", (1,), look)
    run(protected, data, ["look"])
    his, mine = torch.cat(seen), torch.cat(evaluated)
    assert len(his) == len(mine) == 6
    assert not any(torch.equal(a, b) for a in his for b in mine)


def test_a_locks_rows_have_both_performances(tmp_path: Path) -> None:
    target = models.real("resnet20_cifar10")
    pixels, labels = zoo.natural("resnet20_cifar10", 60)
    locked = lock(target, kind="internal", seed=0, steps=20, restarts=2)
    rows = run(locked, Tensors(pixels, labels), ["trigger-crop", "retrain-last", "forge"], strengths=None)
    none, crop, *_ = rows
    assert none.verdict == "locked"
    assert none.performance is not None
    assert none.unlocked is not None
    assert none.performance < 0.4 < 0.7 < none.unlocked
    assert crop.unlocked is not None
    assert crop.unlocked < 0.4  # cropped by a pixel, the patch is no key
    assert [row.verdict for row in rows if row.attack == "retrain-last"] == ["opened"] * 2  # as the threat model says
    assert "against a stain" in rows[-1].note


def test_damaged_rows_are_told(tmp_path: Path) -> None:
    append_row(tmp_path, Row("a", 1, "use", "stain", performance=float("nan")))
    assert read_rows(tmp_path)[0].performance is None
    (tmp_path / ROWS).write_text("nonsense\n")
    with pytest.raises(FileError, match="line 1 is not a row"):
        read_rows(tmp_path)


def test_an_unknown_attack_is_told(protected: tuple[Target, Key], data: Tensors) -> None:
    with pytest.raises(ValueError, match="did you mean fp16"):
        run(protected, data, ["fpp16"])
