"""Sweeps on a real Ray cluster of this machine, and addresses where there is none."""

from __future__ import annotations

import importlib.util
import socket
import sys
from collections import Counter
from pathlib import Path

import pytest
from works import Sums, begun

from stainlock.errors import SweepError
from stainlock.sweeps import ray_workers, run_sweep

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: stainlock[ray]")


@pytest.mark.slow
@needs_ray
def test_two_workers_give_the_rows_of_one_process_though_one_of_them_is_killed(tmp_path: Path) -> None:
    trace, out = str(tmp_path / "trace"), tmp_path / "out"
    alone = run_sweep(Sums(f"{trace}-alone"), tmp_path / "alone")
    rows = run_sweep(Sums(trace, killed={"layer-2": 1}), out, workers=2, ray="local")
    assert rows == alone
    assert Counter(begun(trace)) == {f"layer-{i}": 2 if i == 2 else 1 for i in range(6)}
    assert len({pid for unit in Sums(trace).units() for pid in begun(trace, unit.name)}) >= 2
    mine, theirs = ((folder / "units.jsonl").read_text().splitlines() for folder in (out, tmp_path / "alone"))
    assert sorted(mine) == sorted(theirs)


@needs_ray
def test_a_cluster_that_does_not_answer_is_told_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "PATIENCE", 1.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SweepError, match=f"no Ray cluster answers at {address} .*refused"):
            run_sweep(Sums(str(tmp_path / "trace")), ray=address)
        taken.listen()  # now something listens there, but it is not Ray
        with pytest.raises(SweepError, match=f"no Ray cluster answers at {address} "):
            run_sweep(Sums(str(tmp_path / "trace")), ray=address)
    assert not begun(tmp_path / "trace")


@needs_ray
@pytest.mark.parametrize("address", ["here", "host:port", "host:99999", "http://host:1", ""])
def test_what_is_no_address_is_told(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="expected a Ray address"):
        run_sweep(Sums(str(tmp_path / "trace")), ray=address)


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SweepError, match=r"pip install stainlock\[ray\]"):
        run_sweep(Sums(str(tmp_path / "trace")), ray="local")
