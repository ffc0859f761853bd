"""Sweeps: every unit once, the same rows however they are run, and one line where something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import fresh
import pytest
import torch
import works
from works import Sums, begun

from stainlock.errors import FileError, SweepError
from stainlock.sweeps import Unit, run_sweep
from stainlock.sweeps.journal import UNITS


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tmp_path / "trace")


def test_rows_come_in_the_order_of_the_units(trace: str) -> None:
    told: list[tuple[int, int]] = []
    rows = run_sweep(Sums(trace), progress=lambda done, total: told.append((done, total)))
    assert [(row["layer"], row["part"]) for row in rows] == [(i, part) for i in range(6) for part in range(2)]
    assert told == [(done, 6) for done in range(7)]


def test_a_unit_counts_as_done_once_its_rows_were_taken(trace: str, tmp_path: Path) -> None:
    taken: list[str] = []

    def take(unit: Unit, rows: list[dict[str, object]]) -> None:
        if unit.name == "layer-2" and "refused" not in taken:
            taken.append("refused")
            raise FileError("no room")
        taken.append(unit.name)

    with pytest.raises(FileError, match="no room"):
        run_sweep(Sums(trace, count=4), tmp_path / "out", on_unit=take)
    run_sweep(Sums(trace, count=4), tmp_path / "out", on_unit=take)
    assert taken == ["layer-0", "layer-1", "refused", "layer-2", "layer-3"]


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.quick_workers(monkeypatch)


@pytest.mark.usefixtures("quick_workers")
def test_workers_give_the_same_rows_as_one_process_though_one_of_them_is_killed(trace: str) -> None:
    alone = run_sweep(Sums(f"{trace}-alone"))
    threads = torch.get_num_threads()
    assert run_sweep(Sums(trace, killed={"layer-1": 1}), workers=2) == alone
    assert torch.get_num_threads() == threads
    assert Counter(begun(trace)) == {f"layer-{i}": 2 if i == 1 else 1 for i in range(6)}


def test_a_finished_sweep_is_read_and_a_wider_one_runs_what_is_new(trace: str, tmp_path: Path) -> None:
    first = run_sweep(Sums(trace, count=3), tmp_path / "out")
    again = run_sweep(Sums(trace, count=5), tmp_path / "out")
    assert again[: len(first)] == first
    assert begun(trace) == [f"layer-{i}" for i in range(5)]
    assert run_sweep(Sums(trace, count=3), tmp_path / "out") == first


SWEEP = """
import sys
sys.path.insert(0, sys.argv[1])
from works import Sums
from stainlock.sweeps import run_sweep
run_sweep(Sums(sys.argv[2], seconds=0.2, count=12), sys.argv[3], workers=int(sys.argv[4]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_sweep_goes_on_without_losing_or_repeating_a_unit(trace: str, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "out"
    with fresh.Interpreter(SWEEP, str(Path(works.__file__).parent), trace, str(out), str(workers)) as process:
        while len(lines(out)) < 4:  # the first line, and three units
            assert not process.ended(), process.wait()
            time.sleep(0.01)
        process.kill()
    kept = lines(out)
    rows = run_sweep(Sums(trace, count=12), out)
    assert lines(out)[: len(kept)] == kept
    assert rows == run_sweep(Sums(f"{trace}-alone", count=12))
    units = [unit.name for unit in Sums(trace, count=12).units()]
    run_now = [name for name in units if str(os.getpid()) in begun(trace, name)]
    assert sorted([json.loads(line)["unit"] for line in kept[1:]] + run_now) == sorted(units)


def lines(folder: Path) -> list[str]:
    """The whole lines of a sweep's journal."""
    return (folder / UNITS).read_text().split("\n")[:-1] if (folder / UNITS).exists() else []


@pytest.mark.usefixtures("quick_workers")
def test_a_unit_that_kills_every_worker_is_given_up(trace: str) -> None:
    with pytest.raises(SweepError, match="gave up on unit layer-0: its worker died 2 times, last by SIGKILL"):
        run_sweep(Sums(trace, count=1, killed={"layer-0": 9}), workers=2, retries=1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("ours", "unit layer-2 failed: no such layer$"),
        ("theirs", "unit layer-2 failed: RuntimeError: shapes differ$"),
        ("rows", "unit layer-2 failed: TypeError: .*not JSON serializable$"),
    ],
)
def test_an_exception_names_its_unit_on_one_line(trace: str, tmp_path: Path, what: str, message: str) -> None:
    with pytest.raises(SweepError, match=message):
        run_sweep(Sums(trace, broken={"layer-2": what}), tmp_path / "out")
    assert len(run_sweep(Sums(trace), tmp_path / "out")) == 12  # what was done before is kept
    assert Counter(begun(trace)) == {f"layer-{i}": 2 if i == 2 else 1 for i in range(6)}


@pytest.mark.usefixtures("quick_workers")
def test_an_exception_in_a_worker_reads_the_same(trace: str) -> None:
    with pytest.raises(SweepError, match=r"unit layer-0 failed: RuntimeError: shapes differ$"):
        run_sweep(Sums(trace, count=1, broken={"layer-0": "theirs"}), workers=2)


COMMAND = """
import importlib, sys
import stainlock.cli.app
if __name__ == "__main__":
    importlib.reload(stainlock)  # as a verb does
    sys.path.insert(0, sys.argv[1])
    from works import Sums
    from stainlock.sweeps import run_sweep
    assert len(run_sweep(Sums(sys.argv[2], count=1), workers=2)) == 2
"""


def test_workers_of_the_command_have_the_library(trace: str, tmp_path: Path) -> None:
    (tmp_path / "stainlock").write_text(COMMAND)  # it is the command by its name
    subprocess.run([sys.executable, tmp_path / "stainlock", Path(works.__file__).parent, trace], check=True)


def test_two_units_of_one_name_are_refused(trace: str) -> None:
    class Twice(Sums):
        def units(self) -> list[Unit]:
            return [*super().units(), Unit("layer-1")]

    with pytest.raises(ValueError, match="got 2 named layer-1"):
        run_sweep(Twice(trace))


def test_a_folder_that_cant_be_made_is_told(trace: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="can't write"):
        run_sweep(Sums(trace), tmp_path / "file")
    assert not begun(trace)
