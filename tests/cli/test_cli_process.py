"""Behaviour that needs a separate process: start-up, pipes, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fresh
import pytest

# The installed command, with Ctrl-C as in a terminal even where the tests run in the background.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = "stainlock"
from stainlock.cli import main
{then}
"""
RUN = COMMAND.format(then="sys.exit(main())")


def start(work: Path, *arguments: str, script: str = RUN) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_help_and_usage_errors_do_not_wait_for_torch(work: Path) -> None:
    then = "status = main(); assert 'torch' not in sys.modules; sys.exit(status)"
    for arguments, status in ((["--help"], 0), (["stain", "--help"], 0), (["inspect"], 2), (["stian"], 2)):
        process = start(work, *arguments, script=COMMAND.format(then=then))
        assert (process.communicate()[1].count("Traceback"), process.returncode) == (0, status)


def test_factories_find_the_whole_library(work: Path) -> None:
    """The command loads the library late; a factory's `import stainlock` must work all the same."""
    script = "import stainlock as sl\nassert callable(sl.stain) and callable(sl.evaluate) and callable(sl.verify)\n"
    (work / "small.py").write_text(script + "import torchvision\n" + (work / "small.py").read_text())
    done = fresh.run(RUN, "inspect", "small.py:model", "--json", folder=work)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sites"]


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "small.py:model", "--json"]])
def test_a_reader_that_leaves_early_is_no_error(work: Path, arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = fresh.run(RUN, *arguments, folder=work, stdout=writes)
    os.close(writes)
    assert done.returncode == 141
    assert "Error" not in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_interrupt_leaves_nothing(work: Path) -> None:
    factory = (work / "small.py").read_text().replace('print("a factory that talks")', "open('begun', 'w').close()")
    (work / "small.py").write_text(factory)
    before = {path.name for path in work.iterdir()}
    options = ["--out", "new", "--key", "new.key", "--trigger", "t.png", "--steps", "1000000"]
    with fresh.Interpreter(RUN, "stain", "small.py:model", *options, folder=work) as process:
        while not (work / "begun").exists():
            assert not process.ended(), process.wait()
            time.sleep(0.05)
        time.sleep(1)
        process.kill(signal.SIGINT)
        done = process.wait(seconds=30)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert {path.name for path in work.iterdir()} - before <= {"begun", "__pycache__"}
