"""`stainlock reproduce`: what it prints, and one clear line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Run

from stainlock.figures import all_figures


@pytest.fixture
def own(_made: Path) -> list[object]:
    options = ["--model", f"{_made / 'small.py'}:model", "--weights", "random", "--data", _made / "photos"]
    return [*options, "--layers", "3", "--detectors", 1]


def test_list(run: Run) -> None:
    listed = run("reproduce", "--list", "--json")
    figures = listed.facts["figures"]
    assert [one["figure"] for one in figures] == list(all_figures())
    assert all(one["needs"] and one["cost"] for one in figures)
    assert all(name in run("reproduce", "--list").stdout for name in all_figures())


def test_figure_and_files(run: Run, own: list[object], tmp_path: Path) -> None:
    done = run("reproduce", "stain-resnet50", *own, "--out", tmp_path, "--json")
    assert done.status == 0, done.stderr
    assert done.facts["figure"] == "stain-resnet50"
    files = [Path(file) for file in done.facts["files"]]
    assert all(file.is_file() for file in files)
    assert {file.suffix for file in files} == {".png", ".svg", ".csv", ".json", ".html"}


def test_errors(run: Run, own: list[object], tmp_path: Path) -> None:
    def refused(text: str, *arguments: object) -> None:
        result = run("reproduce", *arguments, "--out", tmp_path / "out")
        assert (result.status, result.stdout) == (2, "")
        lines = [line for line in result.stderr.splitlines() if line != "a factory that talks"]
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        assert text in lines[0]

    refused("expected FIGURE, got none")
    refused("did you mean", "stain-resnet")
    refused("image-net.org", "stain-resnet50")
    refused("expected no --data with all", "all", "--data", tmp_path)
    refused("no figure could be made: expected --data DIR, or --quick", "all", "--quiet")
    refused("found a file at", "stain-resnet50", *own, "--data", __file__)
    refused("Ray", "stain-resnet50", *own, "--ray", "no address", "--quiet")


def test_no_room(run: Run, own: list[object], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file where the folder should be")
    result = run("reproduce", "stain-resnet50", *own, "--out", tmp_path / "out")
    assert result.status == 2
    assert "can't write" in result.stderr


def test_all_leaves_out_what_fails(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stainlock.errors import SweepError

    def one_works(name: str, out: Path, **_: object) -> list[Path]:
        if name != "saliency":
            raise SweepError(f"unit of {name} failed")
        return [out / "report.html"]

    monkeypatch.setattr("stainlock.figures.run.reproduce", one_works)
    done = run("reproduce", "all", "--quick", "--out", tmp_path, "--json")
    assert done.status == 0
    assert done.facts["figures"] == ["saliency"]
    assert set(done.facts["left_out"]) == set(all_figures()) - {"saliency"}
    assert done.facts["left_out"]["pruning"] == "unit of pruning failed"
