"""What a sweep consists of: units, and the work that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from stainlock.errors import StainlockError
from stainlock.sweeps.journal import plain

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Unit:
    """One piece of work: a layer, a detector, a shard of the data.

    ``name`` is unique within the sweep and the same in every run; ``facts`` is the input of `Work.run`, as JSON.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class Work(Protocol):
    """What is done in every unit. It is pickled for other processes: use a module-level class with small fields.

    Large things (model, data, caches) are made by ``prepare``, once per process.
    """

    def units(self) -> list[Unit]: ...

    def identity(self) -> dict[str, Any]:
        """Everything that results depend on, as JSON: digests of model and data, parameters, version."""
        ...

    def prepare(self) -> Any: ...

    def run(self, state: Any, unit: Unit) -> Rows:
        """The unit's rows, as JSON. They must be the same whenever and wherever the unit runs."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of a unit: its rows, or why it failed, or how its worker ``died``."""

    rows: Rows = field(default_factory=list)
    failed: str | None = None
    died: str | None = None


class Worker:
    """Runs units in one process, after preparing once.

    It uses one thread, so sums do not depend on the number of cores, and workers do not compete for them.
    """

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(1)
        self.work = work
        self._state: list[Any] = []  # empty, or the result of `prepare`, which may be None

    def run(self, unit: Unit) -> Rows:
        if not self._state:
            self._state.append(self.work.prepare())
        rows: Rows = plain(self.work.run(self._state[0], unit))
        return rows

    def attempt(self, unit: Unit) -> Outcome:
        """The same, with an exception as text, since not every exception can be pickled."""
        try:
            return Outcome(self.run(unit))
        except Exception as error:  # a unit runs models and libraries, which fail in arbitrary ways
            return Outcome(failed=in_words(error))


def in_words(error: BaseException) -> str:
    """An exception on one line; our own errors and wrong arguments explain themselves."""
    text = " ".join(str(error).split())
    explained = isinstance(error, StainlockError | ValueError) and text
    return text if explained else f"{type(error).__name__}: {text}"
