"""run_sweep(): complete every unit once, despite interruptions and dying workers."""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from stainlock.errors import SweepError
from stainlock.sweeps.journal import Journal
from stainlock.sweeps.processes import Crew, Processes
from stainlock.sweeps.ray_workers import RayWorkers
from stainlock.sweeps.unit import Rows, Unit, Work, Worker, in_words


def run_sweep(
    work: Work,
    folder: str | Path | None = None,
    *,
    workers: int = 1,
    ray: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    retries: int = 2,
    on_unit: Callable[[Unit, Rows], None] | None = None,
) -> Rows:
    """Rows of all units in the order of ``work.units()``, in whatever order they finish.

    With a folder, rows are saved in ``units.jsonl`` as they arrive, and units already in it are not run again.
    ``workers`` is the number of processes, one thread each; 1 means this process. ``ray`` is the address of a Ray
    cluster, or ``local`` for one on this machine; with Ray, 1 means one worker per CPU. A worker that dies is replaced
    and its unit run again, up to ``retries`` times; an exception in a unit ends the sweep. ``progress`` is called with
    the number of units done and their total. ``on_unit`` is called in this process with each unit and its rows, before
    the unit counts as done.
    """
    if workers < 1 or retries < 0:
        raise ValueError(f"expected workers of at least 1 and retries of at least 0, got {workers} and {retries}")
    units = _checked(work.units())
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stainlock-sweep-"))
        journal = stack.enter_context(Journal(Path(folder), work.identity()))
        todo = [unit for unit in units if unit.name not in journal.done]
        done = len(units) - len(todo)
        if progress is not None:
            progress(done, len(units))
        results = stack.enter_context(closing(_results(work, todo, workers, ray, retries)))
        for unit, rows in results:
            if on_unit is not None:
                on_unit(unit, rows)
            journal.append(unit.name, rows)
            done += 1
            if progress is not None:
                progress(done, len(units))
        found = dict(journal.entries())
        return [row for unit in units for row in found[unit.name]]


def _checked(units: list[Unit]) -> list[Unit]:
    for name, count in Counter(unit.name for unit in units).items():
        if count > 1:
            raise ValueError(f"expected every unit to have a unique name, got {count} named {name}")
    return units


def _results(
    work: Work, units: list[Unit], workers: int, ray: str | None, retries: int
) -> Generator[tuple[Unit, Rows], None, None]:
    if not units:  # don't start workers or connect to a cluster
        return
    if ray is None and workers == 1:
        yield from _run_here(work, units)
        return
    if ray is None:
        crew: Crew = Processes(work, workers)
    else:
        crew = RayWorkers(work, ray, workers)
    with crew:
        yield from _share_out(crew, units, retries)


def _run_here(work: Work, units: list[Unit]) -> Iterator[tuple[Unit, Rows]]:
    with _threads_restored():
        worker = Worker(work)
        for unit in units:
            try:
                rows = worker.run(unit)
            except Exception as error:
                raise SweepError(f"unit {unit.name} failed: {in_words(error)}") from error
            yield unit, rows


@contextmanager
def _threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _share_out(crew: Crew, units: list[Unit], retries: int) -> Iterator[tuple[Unit, Rows]]:
    """Hand units to workers as they become free. If a worker dies, its successor gets its unit."""
    waiting = deque(units)
    deaths: Counter[str] = Counter()
    busy: dict[Any, Unit] = {}

    def give(worker: Any) -> None:
        busy[worker] = waiting.popleft()
        crew.give(worker, busy[worker])

    for _ in range(min(crew.size, len(units))):
        give(crew.hire())
    while busy:
        worker, outcome = crew.wait()
        unit = busy.pop(worker, None)
        if unit is None:  # an idle worker ended
            continue
        if outcome.failed is not None:
            raise SweepError(f"unit {unit.name} failed: {outcome.failed}")
        if outcome.died is not None:
            deaths[unit.name] += 1
            if deaths[unit.name] > retries:
                raise SweepError(f"gave up on unit {unit.name}: its worker died {deaths[unit.name]} times, last"
                                 f" {outcome.died}")  # fmt: skip
            waiting.appendleft(unit)
            give(crew.hire())
            continue
        if waiting:  # before the rows are saved, so the worker does not wait for the disk
            give(worker)
        yield unit, outcome.rows
