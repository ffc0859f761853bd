"""Deliberate mistakes in lines that matter, one at a time: do the tests notice?

``make mutants``, or ``python benchmarks/mutants.py``, copies the package to a temporary folder, makes one change of
`mutant_list.MUTANTS` there, runs the tests named with it, and goes on to the next. A mutant is caught if one of them
fails, or if they don't end within five minutes. First all of these tests must pass on the package as it
is. A snippet that is not in its file exactly once is an error, so that the list stays true to the code. The exit
status is 1 where less than 95 % are caught. ``--only`` takes mutants whose file or snippet contains a word.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import scipy.special
import torch

from mutant_list import MUTANTS, Mutant

LOADED = (numpy, scipy.special, torch)  # once, for every process forked below
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "stainlock"
GOAL = 0.95
SECONDS = 300  # more than the tests of any mutant take; a mutant that hangs was noticed


def misplaced(mutants: Sequence[Mutant]) -> list[str]:
    """Of every mutant whose snippet is not in its file once, where it should be."""
    found = [(m, (PACKAGE / m.file).read_text(encoding="utf-8").count(m.snippet)) for m in mutants]
    return [f"{m.file}: expected this once, found it {times} times: {m.snippet}" for m, times in found if times != 1]


def run_tests(source: Path, tests: Sequence[str], log: Path, seconds: float | None = SECONDS) -> int | None:
    """The exit status of pytest with the package in this folder; None where it did not end in time."""
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(source, tests, log))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def _pytest(source: Path, tests: Sequence[str], log: Path) -> None:
    os.chdir(ROOT)
    os.setpgrp()
    torch.set_num_threads(1)
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    with log.open("w", encoding="utf-8") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        import stainlock

        assert Path(stainlock.__file__).parent.parent == source, f"another stainlock is imported: {stainlock.__file__}"
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
        status = int(pytest.main([*options, *tests]))
    os._exit(status)


def survives(mutant: Mutant, folder: Path) -> bool:
    """Whether all tests pass with the change; folder/src has the package."""
    path = folder / "src" / "stainlock" / mutant.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutant.snippet, mutant.change), encoding="utf-8")
    try:
        status = run_tests(folder / "src", mutant.tests, folder / "log")
    finally:
        path.write_text(whole, encoding="utf-8")
    if status not in (0, 1, 2, None):  # 1: a test failed; 2: a module can't be imported with the change
        raise RuntimeError(f"pytest ended with {status} for {mutant.file}:\n{(folder / 'log').read_text()[-2000:]}")
    return status == 0


def run(mutants: Sequence[Mutant]) -> tuple[int, list[Mutant]]:
    """How many mutants were caught, and those that were not."""
    if wrong := misplaced(mutants):
        raise ValueError("\n".join(wrong))
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / "src" / "stainlock", ignore=shutil.ignore_patterns("__pycache__"))
        every = sorted({test for mutant in mutants for test in mutant.tests})
        status = run_tests(folder / "src", every, folder / "log", seconds=None)
        if status != 0:
            raise RuntimeError("the tests fail without any change:\n" + (folder / "log").read_text()[-3000:])
        for mutant in mutants:
            start = time.perf_counter()
            survived = survives(mutant, folder)
            survivors += [mutant] if survived else []
            word = "SURVIVED" if survived else "caught"
            first = mutant.snippet.strip().splitlines()[0]
            print(f"{word:9}{time.perf_counter() - start:5.0f} s  {mutant.file}: {first}", flush=True)
    return len(mutants) - len(survivors), survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="mutants whose file or snippet contains one of these")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or any(w in m.file or w in m.snippet for w in options.only)]
    try:
        caught, survivors = run(chosen)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    for mutant in survivors:
        print(f"not noticed: {mutant.file}: {mutant.snippet.strip()} -> {mutant.change.strip()}")
    print(f"{caught} of {len(chosen)} mutants caught")
    return 0 if chosen and caught >= GOAL * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
