"""Workers of a Ray cluster: the same units and the same results, on many machines. Needs ``stainlock[ray]``."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from typing import Any

from stainlock.errors import SweepError
from stainlock.sweeps.unit import Outcome, Unit, Work, Worker

LOCAL = "local"
PATIENCE = 20.0  # seconds for a cluster to answer
_TRY = "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR', log_to_driver=False)"
_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[^:/\s]+|\[[^\]\s]+\]):(?P<port>\d{1,5})")


class RayWorkers:
    """A crew of Ray actors. An existing connection to a cluster is used and left open."""

    def __init__(self, work: Work, address: str, size: int) -> None:
        self._ray = _ray()
        self.work, self.address, self.size = work, address, size
        self._actors: list[Any] = []
        self._given: dict[Any, Any] = {}  # the future of each outcome, and its worker

    def __enter__(self) -> RayWorkers:
        self._ours = not self._ray.is_initialized()
        if self._ours:
            self._connect()
        if self.size == 1:
            self.size = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        # Ray must not restart or retry anything: the sweep does that itself and counts.
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(Worker)
        return self

    def __exit__(self, *error: Any) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._ours:
            self._ray.shutdown()

    def hire(self) -> Any:
        actor = self._actor.remote(self.work)
        self._actors.append(actor)
        return actor

    def give(self, worker: Any, unit: Unit) -> None:
        self._given[worker.attempt.remote(unit)] = worker

    def wait(self) -> tuple[Any, Outcome]:
        (first,), _ = self._ray.wait(list(self._given), num_returns=1)
        worker = self._given.pop(first)
        try:
            outcome: Outcome = self._ray.get(first)
        except self._ray.exceptions.RayError as error:  # the worker, its machine or the connection failed
            self._actors.remove(worker)
            return worker, Outcome(died=f"by {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        return worker, outcome

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.address == LOCAL:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            count = cores if self.size == 1 else self.size
            here = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}  # so workers find the modules of `work`
            self._ray.init(address=LOCAL, num_cpus=count, include_dashboard=False, runtime_env=here, **quiet)
            return
        _check_answers(self.address)
        self._ray.init(address=self.address, **quiet)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise SweepError("a sweep on Ray needs the package ray: pip install stainlock[ray]") from error
    return ray


def _check_answers(address: str) -> None:
    """Raise within seconds if no cluster answers. Ray itself tries for minutes, so a killable process tries first."""
    found = _ADDRESS.fullmatch(address)
    if address != "auto" and (found is None or not 0 < int(found["port"]) < 65536):
        raise ValueError(f"expected a Ray address HOST:PORT, ray://HOST:PORT, auto or {LOCAL}, got {address!r}")
    try:
        if found is not None:
            socket.create_connection((found["host"].strip("[]"), int(found["port"])), timeout=PATIENCE / 4).close()
        tried = subprocess.run([sys.executable, "-c", _TRY, address], capture_output=True, text=True, timeout=PATIENCE)
    except OSError as error:
        raise _unanswered(address, error) from error
    except subprocess.TimeoutExpired as error:
        told = (error.stderr or b"").decode(errors="replace")
        raise _unanswered(address, f"not within {PATIENCE:.0f} s; {_last_line(told)}") from error
    if tried.returncode:
        raise _unanswered(address, _last_line(tried.stderr))


def _last_line(told: str) -> str:
    """Ray's last line of output. If a cluster requires a token, Ray only repeats that it is unauthenticated."""
    last = told.strip().rpartition("\n")[2]
    return "it requires a token: set RAY_AUTH_MODE and RAY_AUTH_TOKEN" if "Unauthenticated" in told else last


def _unanswered(address: str, reason: object) -> SweepError:
    why = " ".join(str(reason).split())[:200] or type(reason).__name__
    return SweepError(f"no Ray cluster answers at {address} ({why}): is it running, and reachable from here?")
