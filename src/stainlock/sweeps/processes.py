"""Workers on this machine: spawned processes, which inherit no locks or threads from this one."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from stainlock.sweeps.unit import Outcome, Unit, Work, Worker

_GOODBYE = 5.0  # seconds that idle workers have to exit normally


class Crew(Protocol):
    """A group of workers. `wait` returns a worker that finished its unit or ended, and the outcome."""

    size: int

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...

    def hire(self) -> Any: ...

    def give(self, worker: Any, unit: Unit) -> None: ...

    def wait(self) -> tuple[Any, Outcome]: ...


class Processes:
    """A crew of processes, each behind a pipe."""

    def __init__(self, work: Work, size: int) -> None:
        self.work, self.size = work, size
        self._processes: dict[Connection, SpawnProcess] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: Any) -> None:
        for connection in self._processes:
            connection.close()  # makes idle workers exit
        for process in self._processes.values():
            process.join(0 if error[0] is not None else _GOODBYE)
            process.kill()  # unfinished units are run again by the next sweep
        for connection in list(self._processes):
            self._buried(connection)

    def hire(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, pickle.dumps(self.work)), daemon=True)
        process.start()
        theirs.close()  # so the pipe closes when the worker dies
        self._processes[ours] = process
        return ours

    def give(self, worker: Connection, unit: Unit) -> None:
        with suppress(OSError):  # already dead: `wait` will report it
            worker.send(unit)

    def wait(self) -> tuple[Connection, Outcome]:
        worker = wait(list(self._processes))[0]
        assert isinstance(worker, Connection)
        try:
            outcome: Outcome = worker.recv()
        except (EOFError, OSError):
            return worker, Outcome(died=self._buried(worker))
        return worker, outcome

    def _buried(self, worker: Connection) -> str:
        """Clean up after a worker that ended, and say how it ended."""
        process = self._processes.pop(worker)
        process.join()
        code = process.exitcode or 0
        worker.close()
        process.close()
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"


def _serve(connection: Connection, pickled: bytes) -> None:
    """The main loop of a worker, until its pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process
    worker, leader = Worker(pickle.loads(pickled)), multiprocessing.parent_process()
    assert leader is not None
    with suppress(EOFError, OSError):
        while True:
            unit = connection.recv()
            if not leader.is_alive():  # it was killed, with a unit still in the pipe
                return
            connection.send(worker.attempt(unit))
