"""The runner: rows that survive an interrupt, tables, and a one-line note if something can't be done."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from PIL import Image

import stainlock.attacks as attacks
import stainlock.evaluation.data
import zoo
from stainlock import Key, Target, lock, stain
from stainlock.attacks import Attack, Attacked, NotApplicable, Subject
from stainlock.attacks.pixels import Pixels, subset
from stainlock.attacks.rows import ROWS, Row, append_row, claimed, read_rows
from stainlock.attacks.run import attack
from stainlock.errors import FileError
from stainlock.evaluation import Images, Tensors

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
    return attack(*protected, data, names=names, decoys=24, **options)


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


@pytest.fixture
def files(tmp_path: Path) -> Images:
    """Image files in two classes."""
    levels = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), dtype=np.uint8)
    for number, image in enumerate(levels):
        path = tmp_path / "images" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    return Images.from_folder(tmp_path / "images")


@pytest.mark.parametrize("limit", [None, 9])
def test_files_give_the_rows_that_their_pixels_would(
    protected: tuple[Target, Key], files: Images, limit: int | None
) -> None:
    """Image files are read only when an attack needs them; the results are the same."""
    batches = list(files.batches(protected[0]))
    pixels = Tensors(torch.cat([pixels for pixels, _ in batches]), files.labels)
    names = ["fp16", "fine-tune-all", "fine-tune-last"]
    found, expected = (
        [replace(row, seconds=0.0, identity="") for row in run(protected, data, names, strengths=[1e-3], limit=limit)]
        for data in (files, pixels)
    )
    assert found == expected


def test_a_thiefs_files_are_asked_for_as_a_tensor_is(protected: tuple[Target, Key], files: Images) -> None:
    target = protected[0]
    lazy, whole = Pixels(files, target), torch.cat([pixels for pixels, _ in files.batches(target)])
    order = torch.tensor([5, 0, 5])
    assert len(lazy) == len(whole) == 12
    assert torch.equal(lazy[:3], whole[:3])
    assert torch.equal(lazy[9:40], whole[9:40])
    assert torch.equal(lazy[order], whole[order])
    assert lazy[3:3].shape == whole[3:3].shape
    assert torch.equal(torch.cat(list(lazy.split(5))), whole)
    assert [len(batch) for batch in lazy.split(5)] == [5, 5, 2]
    assert torch.equal(subset(lazy, order)[:], subset(whole, order))


def test_no_more_files_are_read_than_were_asked_for(
    protected: tuple[Target, Key], files: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    real = stainlock.evaluation.data.open_image

    def noted(path: Path, mode: str) -> Any:
        read.append(path)
        return real(path, mode)

    monkeypatch.setattr("stainlock.evaluation.data.open_image", noted)
    lazy = Pixels(files, protected[0])
    assert read == []
    assert len(lazy[:3]) == 3
    assert sorted(read) == sorted(files.paths[:3])


def test_two_runs_do_not_write_to_one_folder(protected: tuple[Target, Key], data: Tensors, tmp_path: Path) -> None:
    with (
        claimed(tmp_path / "out"),
        pytest.raises(FileError, match=r"another run is writing to .*out: wait for it, or choose another folder"),
    ):
        run(protected, data, ["fp16"], out=tmp_path / "out")
    assert (tmp_path / "out" / ROWS).read_bytes() == b""
    assert len(run(protected, data, ["fp16"], out=tmp_path / "out")) == 2


def test_altered_rows_are_refused_and_those_of_the_first_version_taken_up(
    protected: tuple[Target, Key], data: Tensors, tmp_path: Path
) -> None:
    run(protected, data, ["fp16"], out=tmp_path)
    lines = (tmp_path / ROWS).read_text().splitlines()
    second = json.loads(lines[1])
    for wrong, message in (
        (second | {"performance": 1.0}, "its checksum does not match"),
        ({name: value for name, value in second.items() if name != "checksum"}, "has no checksum, unlike those before"),
    ):
        (tmp_path / ROWS).write_text(f"{lines[0]}\n{json.dumps(wrong)}\n")
        with pytest.raises(FileError, match=f"rows.jsonl line 2 is not a row of results .*{message}"):
            read_rows(tmp_path)
    old = [json.dumps({n: v for n, v in json.loads(line).items() if n != "checksum"}) for line in lines]
    (tmp_path / ROWS).write_text("\n".join(old) + "\n")
    measured: list[Row] = []
    run(protected, data, ["fp16"], out=tmp_path, finished=measured.append)
    assert measured == []
