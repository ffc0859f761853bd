"""One table of robustness checks: what was tried against the project, and the result.

``python benchmarks/hardening.py`` runs, one after another, the fuzzing of every file format (``make fuzz``), hostile
files, forged claims (tests/test_forgeries.py, tests/test_commitment.py), faults (killed processes, full disks, damaged
journals), the mutants (``make mutants``) and the validity of p-values, and prints one line for each. ``--parts``
selects some of them. ``--cases`` is the number of damaged files per format, ``--keys`` the number of random keys. The
output of each part goes to ``--logs``. Exit status 1 if a part fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORGERIES = ("tests/test_forgeries.py", "tests/test_commitment.py", "tests/certificates/test_public.py")
HOSTILE = ("tests/test_hostile_files.py", "tests/test_costs.py", "tests/cli/test_cli_hostile.py")
FAULTS = ("tests/test_durability.py", "tests/test_files.py", "tests/sweeps/test_journal.py",
          "tests/sweeps/test_engine.py", "tests/cli/test_cli_process.py")  # fmt: skip


@dataclass(frozen=True)
class Line:
    """What was tried, how many times, the result, and whether it is as expected."""

    what: str
    tried: str
    result: str
    good: bool | None  # None: not run


@dataclass(frozen=True)
class Options:
    cases: int
    keys: int
    logs: Path

    def output(self, name: str, command: list[str], **environment: str) -> tuple[int, str]:
        """Exit status and output of a command; the output is also saved in a file."""
        own = ("src", "benchmarks", "tests", "tests/fuzz")
        paths = [*(str(ROOT / folder) for folder in own), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=variables | environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        (self.logs / f"{name}.log").write_text(done.stdout, encoding="utf-8")
        return done.returncode, done.stdout


def fuzz(options: Options) -> Line:
    what, script = "damaged and senseless files", ROOT / "tests" / "fuzz" / "run.py"
    if not script.exists():
        return Line(what, "0", "not run: there is no tests/fuzz", None)
    found = str(options.logs / "fuzz-found")
    status, text = options.output("fuzz", [str(script)], FUZZ_CASES=str(options.cases), FUZZ_FOUND=found)
    total = re.search(r"^all\s+(\d+)\s+(\d+)\s+(\d+)\s+(\d+)", text, re.MULTILINE)
    if total is None:
        return Line(what, "0", f"aborted with status {status}, see fuzz.log", good=False)
    tried, refused, accepted, foreign = total.groups()
    return Line(what, tried, f"{refused} refused cleanly, {accepted} read, {foreign} foreign exceptions", status == 0)


def tests_of(name: str, what: str, files: tuple[str, ...], verb: str) -> Callable[[Options], Line]:
    """A part whose cases are the tests in these files."""

    def run(options: Options) -> Line:
        command = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files]
        status, text = options.output(name, command)
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", text)}
        tried = counts.get("passed", 0) + counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
        skipped = f", {counts['skipped']} skipped" if "skipped" in counts else ""
        return Line(what, str(tried), f"{counts.get('passed', 0)} {verb}{skipped}", status == 0)

    return run


def mutants(options: Options) -> Line:
    status, text = options.output("mutants", ["benchmarks/mutants.py"])
    total = re.search(r"^(\d+) of (\d+) mutants caught", text, re.MULTILINE)
    if total is None:
        return Line("deliberate mistakes in the code", "0", "aborted, see mutants.log", good=False)
    caught, tried = map(int, total.groups())
    return Line("deliberate mistakes in the code", str(tried), f"{caught} caught ({caught / tried:.0%})", status == 0)


def validity(options: Options) -> Line:
    status, text = options.output("validity", ["benchmarks/validity.py", "--keys", str(options.keys)])
    rows = re.findall(r"^\| (?!case)[^|]+ \| (\d+) \|", text, re.MULTILINE)
    fail = re.search(r"^\d+ rows, (\d+) fail", text, re.MULTILINE)
    if fail is None:
        return Line("random keys on unstained models", "0", "aborted, see validity.log", good=False)
    result = f"P(p ≤ α) ≤ α not refuted in {len(rows) - int(fail[1])} of {len(rows)} kinds of keys"
    return Line("random keys on unstained models", str(sum(map(int, rows))), result, status == 0)


PARTS: dict[str, Callable[[Options], Line]] = {
    "fuzz": fuzz,
    "hostile": tests_of("hostile", "hostile bundles, deltas and keys", HOSTILE, "refused or harmless"),
    "forgeries": tests_of("forgeries", "forged claims", FORGERIES, "refused or worthless"),
    "faults": tests_of("faults", "kills, full disks, damaged journals", FAULTS, "survived"),
    "mutants": mutants,
    "validity": validity,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--cases", type=int, default=300, help="damaged files per format")
    parser.add_argument("--keys", type=int, default=40, help="random keys per kind, for kinds that need triggers")
    parser.add_argument(
        "--logs", type=Path, default=Path("hardening-logs"), metavar="DIR", help="folder for the output of the parts"
    )
    given = parser.parse_args()
    given.logs.mkdir(parents=True, exist_ok=True)
    options = Options(given.cases, given.keys, given.logs.resolve())
    print("| tried | cases | result | | seconds |\n|---|--:|---|---|--:|", flush=True)
    wrong = 0
    for name, part in PARTS.items():
        if name not in given.parts:
            continue
        start = time.perf_counter()
        line = part(options)
        wrong += line.good is False
        word = {True: "good", False: "WRONG", None: "not run"}[line.good]
        print(
            f"| {line.what} | {line.tried} | {line.result} | {word} | {time.perf_counter() - start:.0f} |", flush=True
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
