"""The journal: lines that survive, and one clear line about those that did not."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from works import Sums, begun

from stainlock.errors import FileError
from stainlock.sweeps import run_sweep
from stainlock.sweeps.journal import UNITS, Journal, append_line, read_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sweep of three units."""
    run_sweep(Sums(str(tmp_path / "trace"), count=3), tmp_path / "out")
    return tmp_path / "out"


def test_rows_are_read_as_json_has_them(tmp_path: Path) -> None:
    with Journal(tmp_path, {"shape": (1, 2)}) as journal:
        journal.append("a", [{"p": float("nan"), "bounds": (1.0, float("inf"))}])
    with Journal(tmp_path, {"shape": [1, 2]}) as journal:
        assert journal.done == {"a"}
        assert dict(journal.entries()) == {"a": [{"p": None, "bounds": [1.0, None]}]}


@pytest.mark.parametrize("kept", [0, 1, 40, -1])
def test_a_torn_last_line_is_dropped_and_its_unit_run_again(folder: Path, tmp_path: Path, kept: int) -> None:
    path = folder / UNITS
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    torn = whole[start:][:kept]
    path.write_bytes(whole[:start] + torn)
    run_sweep(Sums(str(tmp_path / "again"), count=3), folder)
    assert path.read_bytes() == whole
    assert begun(tmp_path / "again") == ["layer-2"]


def test_a_torn_first_line_is_an_empty_journal(folder: Path, tmp_path: Path) -> None:
    path = folder / UNITS
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    run_sweep(Sums(str(tmp_path / "again"), count=3), folder)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b"\n", b"[1]\n", b'{"unit": 3, "rows": []}\n', b"\xff\n", b'{"unit": "a"}\n']
)
def test_a_corrupt_line_is_told_by_its_number(folder: Path, tmp_path: Path, line: bytes) -> None:
    path = folder / UNITS
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, second, line, *rest]))
    with pytest.raises(FileError, match=r"units.jsonl line 3 is not a unit of a sweep \(.*\): remove it, or the file"):
        run_sweep(Sums(str(tmp_path / "again"), count=3), folder)
    assert not begun(tmp_path / "again")


def test_results_of_another_sweep_are_not_mixed_with_these(folder: Path, tmp_path: Path) -> None:
    before = (folder / UNITS).read_bytes()
    with pytest.raises(FileError, match=r"another sweep \(scale was 1.0, is 2.0\): choose another folder"):
        run_sweep(Sums(str(tmp_path / "again"), count=3, scale=2.0), folder)
    assert (folder / UNITS).read_bytes() == before


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"attack": "prune"}, "is not a journal of stainlock"),
        ({"format": "stainlock-sweep", "version": 9, "identity": {}}, "has version 9, this program reads 2"),
    ],
)
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, facts: dict[str, Any], message: str) -> None:
    append_line(tmp_path / UNITS, facts)
    line = (tmp_path / UNITS).read_bytes()
    with pytest.raises(FileError, match=message):
        run_sweep(Sums(str(tmp_path / "trace")), tmp_path)
    assert (tmp_path / UNITS).read_bytes() == line


def test_lines_without_a_checksum_or_with_another_are_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / UNITS
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        facts = json.loads(line)
        checksum = facts.pop("checksum")
        altered = {
            **({"has no checksum, unlike those before it": facts} if number > 1 else {}),
            "its checksum does not match": facts | {"checksum": checksum[:8] + "0" * 56},
            "its checksum does not match, it": facts | {"more": 1, "checksum": checksum},
        }
        for message, changed in altered.items():
            others = [*lines[: number - 1], json.dumps(changed).encode() + b"\n", *lines[number:]]
            path.write_bytes(b"".join(others))
            with pytest.raises(FileError, match=f"units.jsonl line {number} is not a unit of a sweep .*{message}"):
                run_sweep(Sums(str(tmp_path / "again"), count=3), folder)
    path.write_bytes(b"".join(lines))
    run_sweep(Sums(str(tmp_path / "again"), count=3), folder)
    assert not begun(tmp_path / "again")


def test_journals_of_the_first_version_go_on_with_checksums(folder: Path, tmp_path: Path) -> None:
    """Old journals had no checksums: their lines are read, and lines added later have checksums."""
    path = folder / UNITS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for facts in lines:
        del facts["checksum"]
    old = b"".join(json.dumps(facts | {"version": 1} if i == 0 else facts).encode() + b"\n"
                   for i, facts in enumerate(lines[:3]))  # fmt: skip
    path.write_bytes(old)
    run_sweep(Sums(str(tmp_path / "again"), count=3), folder)
    assert begun(tmp_path / "again") == ["layer-2"]
    assert path.read_bytes().startswith(old)
    assert ["checksum" in json.loads(line) for line in path.read_text().splitlines()] == [False, False, False, True]


def test_two_runs_do_not_write_to_one_folder(folder: Path, tmp_path: Path) -> None:
    with (
        Journal(folder, Sums("").identity()),
        pytest.raises(FileError, match="another run is writing"),
        Journal(folder, Sums("").identity()),
    ):
        pass


@contextmanager
def little_room() -> Iterator[None]:
    """Within this context, files can't grow beyond 1000 bytes, which simulates a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_where_no_space_is_left_whole_lines_stay_and_with_room_it_goes_on(tmp_path: Path) -> None:
    trace, out = str(tmp_path / "trace"), tmp_path / "out"
    with (
        little_room(),
        pytest.raises(FileError, match=r"can't write .*units.jsonl \(File too large\): what was written"),
    ):
        run_sweep(Sums(trace, count=8), out)
    content = (out / UNITS).read_bytes()
    assert content.endswith(b"\n")
    kept = content.count(b"\n") - 1
    assert 1 <= kept < 8
    run_sweep(Sums(str(tmp_path / "again"), count=8), out)
    assert begun(tmp_path / "again") == [f"layer-{i}" for i in range(kept, 8)]


def test_lines_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    assert list(read_lines(path, "a line")) == []
    append_line(path, {"Δ": 1})
    append_line(path, {"b": [float("-inf")]})
    assert list(read_lines(path, "a line")) == [(1, {"Δ": 1}), (2, {"b": [None]})]
