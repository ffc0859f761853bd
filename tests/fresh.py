"""Fresh interpreters that have loaded torch and nothing of ours, without a wait of seconds for each of them.

A process of its own imports torch once, and forks for each script. What a script does to its modules, folder or signals
ends with it, and it ends as `python -c` does. Scripts run one at a time.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

# A child leaves the loop and runs to the end of the program, where the interpreter ends it as it ends any other.
_SERVER = """
import os, socket, sys, warnings
import torch
_ours = socket.socket(fileno=int(sys.argv[1]))
while True:
    _one, _files, _, _ = socket.recv_fds(_ours, 1, 5)
    if not _one:
        os._exit(0)
    _answers = _files.pop()
    _child = os.fork()
    if not _child:
        break
    for _file in _files:
        os.close(_file)
    os.write(_answers, f"{_child}\\n".encode())
    os.write(_answers, f"{os.waitstatus_to_exitcode(os.waitpid(_child, 0)[1])}\\n".encode())
    os.close(_answers)
_ours.close()
os.close(_answers)
for _number, _file in enumerate(_files[1:]):
    os.dup2(_file, _number)
    os.close(_file)
with os.fdopen(_files[0]) as _file:
    import json
    _request = json.load(_file)
os.chdir(_request["folder"])
os.environ.clear()
os.environ.update(_request["environment"])
sys.argv[1:] = _request["arguments"]
if not _request["strict"]:
    sys.warnoptions.clear()
    warnings.simplefilter("default")
exec(compile(_request["script"], "<string>", "exec"))
"""


@cache
def _server() -> socket.socket:
    """The socket of this process's server, which ends with this process."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _SERVER, str(theirs.fileno())],
        pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # nothing is printed there, but a child may print to a pipe and has the same sys.stdout
    )  # fmt: skip
    theirs.close()

    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        process.communicate()

    atexit.register(end)
    return ours


class Interpreter:
    """A script that runs until it is waited for, or until the block ends. It prints to files, or to the one given.

    Warnings are errors if ``strict``, as they were when torch was imported; otherwise nothing was said of them.
    """

    def __init__(
        self, script: str, *arguments: str, folder: Path | str = ".", given: str = "", stdout: int | None = None,
        environment: dict[str, str] | None = None, strict: bool = False,
    ) -> None:  # fmt: skip
        request = {
            "script": script, "arguments": arguments, "strict": strict, "folder": str(Path(folder).absolute()),
            "environment": dict(os.environ) if environment is None else environment,
        }  # fmt: skip
        self._files = [tempfile.TemporaryFile() for _ in range(4)]  # noqa: SIM115 - closed by `wait`
        for file, text in zip(self._files, (json.dumps(request), given), strict=False):
            file.write(text.encode())
            file.seek(0)
        numbers = [file.fileno() for file in self._files]
        if stdout is not None:
            numbers[2] = stdout
        self._answers, theirs = os.pipe()  # one for each script, so that what is left of one is not read by the next
        socket.send_fds(_server(), [b"1"], [*numbers, theirs])
        os.close(theirs)
        self.pid = self._answer()

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._files[0].closed:
            self.kill()
            self.wait()

    def _answer(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            read = os.read(self._answers, 1)  # no more, so that `select` tells of the next line
            assert read, "the process that forks interpreters has ended"
            line += read
        return int(line)

    def ended(self, seconds: float = 0) -> bool:
        return bool(select.select([self._answers], [], [], seconds)[0])

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Its exit status and what it printed; it is killed if it takes longer."""
        if not self.ended(seconds):
            self.kill()
        status = self._answer()
        os.close(self._answers)
        printed = []
        for file in self._files[2:]:
            file.seek(0)
            printed.append(file.read().decode())
        for file in self._files:
            file.close()
        return subprocess.CompletedProcess([], status, *printed)


def run(script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """What a script prints; its options are those of an interpreter."""
    return Interpreter(script, *arguments, **options).wait()


def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the library spawns come from one that has loaded torch; they too inherit nothing of this one."""
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest"])
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": context}.__getitem__)
