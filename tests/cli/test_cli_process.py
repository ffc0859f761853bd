"""Behaviour that needs a separate process: start-up, pipes, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

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
    process = start(work, "inspect", "small.py:model", "--json")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert json.loads(output)["sites"]


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "small.py:model", "--json"]])
def test_a_reader_that_leaves_early_is_no_error(work: Path, arguments: list[str]) -> None:
    process = start(work, *arguments)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.wait()
    assert process.returncode == 141
    assert "Error" not in errors
    assert "Traceback" not in errors
    assert "Exception" not in errors
    process.stderr.close()


def test_interrupt_leaves_nothing(work: Path) -> None:
    factory = (work / "small.py").read_text().replace('print("a factory that talks")', "open('begun', 'w').close()")
    (work / "small.py").write_text(factory)
    before = {path.name for path in work.iterdir()}
    options = ["--out", "new", "--key", "new.key", "--trigger", "t.png", "--steps", "1000000"]
    process = start(work, "stain", "small.py:model", *options)
    while not (work / "begun").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")
    assert {path.name for path in work.iterdir()} - before <= {"begun", "__pycache__"}
