"""Mutation tests: deliberate mistakes in critical lines, one at a time. Do the tests notice?

``make mutants``, or ``python benchmarks/mutants.py``, copies the package to a temporary folder and, for each entry of
`mutant_list.MUTANTS`, makes the change there and runs the tests named with it. A mutant is caught if one of them fails,
or if they take more than five minutes of processor time. At the end, the tests that failed must pass on the unchanged
package. A snippet that does not occur exactly once in its file is an error, so the list can't go stale unnoticed. Exit
status 1 if fewer than 95 % are caught. ``--only`` selects mutants whose file or snippet contains a word.

Results are saved in ``.mutants.json``. If neither the package nor a test has changed, nothing is run again; otherwise
the test that failed last time is tried first.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import PIL.Image
import pytest
import safetensors.torch
import scipy.optimize
import scipy.stats
import torch
import torch._dynamo

from mutant_list import MUTANTS, Mutant

# Third-party modules that load slowly: imported once, before the processes below are forked.
LOADED = (numpy, PIL.Image, safetensors.torch, scipy.optimize, scipy.stats, torch._dynamo)
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "stainlock"
GOAL = 0.95
_BROKEN = 70  # exit status if pytest itself breaks, which does not count as caught
SECONDS = 300  # processor time, more than the tests of any mutant take; a mutant that hangs counts as caught


def misplaced(mutants: Sequence[Mutant]) -> list[str]:
    """Messages about snippets that do not occur exactly once in their files, and about missing test files."""
    tests = sorted({test.partition("::")[0] for mutant in mutants for test in mutant.tests})
    missing = [f"expected a file of tests, found nothing at {test}" for test in tests if not (ROOT / test).is_file()]
    found = [(m, (PACKAGE / m.file).read_text(encoding="utf-8").count(m.snippet)) for m in mutants]
    wrong = [f"{m.file}: expected this once, found it {times} times: {m.snippet}" for m, times in found if times != 1]
    return missing + wrong


def run_tests(source: Path, tests: Sequence[str], log: Path, seconds: int | None = SECONDS) -> int | None:
    """The exit status of pytest with the package in this folder; None if it ran out of time."""
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(source, tests, log, seconds))
    process.start()
    process.join()
    return None if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL) else process.exitcode


def _pytest(source: Path, tests: Sequence[str], log: Path, seconds: int | None) -> None:
    os.chdir(ROOT)
    os.setpgrp()
    if seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    torch.set_num_threads(1)
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    with log.open("w", encoding="utf-8") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        import stainlock

        assert Path(stainlock.__file__).parent.parent == source, f"another stainlock is imported: {stainlock.__file__}"
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:randomly"]
        try:
            status = int(pytest.main([*options, *tests]))
        except BaseException:
            traceback.print_exc()
            status = _BROKEN
    os._exit(status)


def failing_test(mutant: Mutant, folder: Path, guess: str | None) -> str | None:
    """The test that fails with the change, trying the guess first; None if all pass. The package is in folder/src."""
    path = folder / "src" / "stainlock" / mutant.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace(mutant.snippet, mutant.change), encoding="utf-8")
    try:
        status = run_tests(folder / "src", [guess], folder / "log") if guess else 0
        if status in (0, 4):  # 4: the test no longer exists
            status = run_tests(folder / "src", mutant.tests, folder / "log")
    finally:
        path.write_text(whole, encoding="utf-8")
    text = (folder / "log").read_text(encoding="utf-8")
    if status not in (0, 1, 2, None):  # 1: a test failed; 2: a module can't be imported with the change
        raise RuntimeError(f"pytest ended with {status} for {mutant.file}:\n{text[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::[^\[\s]+)?)", text, re.MULTILINE)
    if status in (1, 2) and failed is None:
        raise RuntimeError(f"pytest failed, but no test did, for {mutant.file}:\n{text[-2000:]}")
    return None if status == 0 else failed[1] if failed else mutant.tests[0]


@dataclass
class Known:
    """Results of earlier runs: the test that failed or None for each mutant, and the digest of the code."""

    path: Path
    code: str
    results: dict[str, str | None]
    hints: dict[str, str | None]

    @staticmethod
    def load(path: Path) -> Known:
        digest = hashlib.sha256()
        for file in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *ROOT.glob("benchmarks/*.py")]):
            digest.update(file.relative_to(ROOT).as_posix().encode() + b"|" + file.read_bytes())
        kept = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"code": "", "results": {}, "hints": {}}
        )
        same = kept["code"] == digest.hexdigest()
        return Known(path, digest.hexdigest(), kept["results"] if same else {}, kept["hints"])

    def add(self, mutant: Mutant, test: str | None) -> None:
        self.results[self.name(mutant)] = self.hints[self.name(mutant)] = test
        kept = {"code": self.code, "results": self.results, "hints": self.hints}
        self.path.write_text(json.dumps(kept, indent=1), encoding="utf-8")

    @staticmethod
    def name(mutant: Mutant) -> str:
        return f"{mutant.file}|{mutant.snippet}|{mutant.change}"


def run(mutants: Sequence[Mutant]) -> tuple[int, list[Mutant]]:
    """The number of mutants caught, and the survivors."""
    if wrong := misplaced(mutants):
        raise ValueError("\n".join(wrong))
    survivors, known = [], Known.load(ROOT / ".mutants.json")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / "src" / "stainlock", ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in mutants:
            start, name = time.perf_counter(), Known.name(mutant)
            if name not in known.results:
                known.add(mutant, failing_test(mutant, folder, known.hints.get(name)))
            test = known.results[name]
            survivors += [mutant] if test is None else []
            word = "SURVIVED" if test is None else "caught"
            first = mutant.snippet.strip().splitlines()[0]
            print(f"{word:9}{time.perf_counter() - start:5.0f} s  {mutant.file}: {first}", flush=True)
        every = sorted({test for mutant in mutants if (test := known.results[Known.name(mutant)])})
        if every and run_tests(folder / "src", every, folder / "log", seconds=None) != 0:
            raise RuntimeError("the tests fail without any change:\n" + (folder / "log").read_text()[-3000:])
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
