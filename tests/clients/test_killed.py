"""Killed while issuing: nothing is lost, no output is incomplete, and the next run finishes the work."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import fresh
import pytest

import stainlock as sl
from stainlock.clients import issuing
from stainlock.models.bundle import Bundle


class Killed(BaseException):
    """Ends a run at some point, as a kill would, with nothing cleaned up."""


@pytest.mark.parametrize("moment", ["while writing", "before the record", "after the record", "between renames"])
def test_the_next_run_completes_what_was_killed(registry: sl.Registry, moment: str) -> None:
    expected = {one["client"]: one["digest"] for one in registry.issue_all("whole", lock="keyed")[0]}
    shutil.rmtree("whole")
    registry.close()
    Path("clients.db").unlink()
    registry.init("mine.py:model")
    registry.add(*expected)

    dead: list[bool] = []

    def killed(*_: object, **__: object) -> None:
        dead.append(True)
        raise Killed

    real_rmtree, real_replace = shutil.rmtree, os.replace

    def rmtree(path: str | Path, **options: Any) -> None:
        if not dead:  # a killed process cleans up nothing
            real_rmtree(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", rmtree)
        if moment == "while writing":
            patch.setattr(issuing, "sync_folder", killed)
        elif moment == "before the record":
            patch.setattr(issuing, "_record", killed)
        elif moment == "after the record":
            patch.setattr(issuing, "publish", killed)
        else:

            def replace(source: str | Path, place: str | Path) -> None:
                if Path(source).parent.name.endswith(".issuing") and Path(source).name == "patch.png":
                    killed()
                real_replace(source, place)

            patch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            registry.issue_all("copies", lock="keyed")
    assert list(Path("copies").glob(".*.issuing"))
    assert not any(Path("copies", name).exists() for name in expected)
    issued, there = registry.issue_all("copies", lock="keyed")
    assert {one["client"]: one["digest"] for one in issued} == expected
    assert there == 0
    assert {name: Bundle.read(Path("copies") / name).digest for name in expected} == expected
    assert [path for path in Path("copies").iterdir() if path.name.startswith(".")] == []
    assert registry.count() == (3, 3)
    assert registry.check_log()[0] == 6


def test_a_process_killed_while_issuing(registry: sl.Registry) -> None:
    """SIGKILL to a real process after the first copies were issued."""
    names = [f"client {number}" for number in range(12)]
    registry.add(*names)
    registry.close()
    script = "import stainlock as sl; sl.Registry('clients.db').issue_all('copies')"
    with fresh.Interpreter(script) as process:
        limit = time.monotonic() + 60
        while not list(Path("copies").glob("*.receipt.json")) and time.monotonic() < limit:
            time.sleep(0.005)
        process.kill()
    present = [path.name for path in Path("copies").iterdir() if path.is_dir() and not path.name.startswith(".")]
    for name in present:
        assert Bundle.read(Path("copies") / name).digest == registry.show(name)[1][0].digest
    registry.check_log()
    issued, there = registry.issue_all("copies")
    assert there == len(present)
    assert len(issued) + there == 15
    assert registry.count() == (15, 15)
