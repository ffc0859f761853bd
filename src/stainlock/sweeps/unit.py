"""What a sweep is made of: units of work, and the work that knows how to do them."""

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

    ``name`` is unique within the sweep and the same in every run; ``facts`` are what `Work.run` needs, as JSON.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class Work(Protocol):
    """What is done in every unit. It is sent to other processes: a class of a module, with small fields.

    Heavy things (model, data, caches) are made by ``prepare``, once in each process.
    """

    def units(self) -> list[Unit]: ...

    def identity(self) -> dict[str, Any]:
        """All that results depend on: digests of model and data, parameters, version. JSON."""
        ...

    def prepare(self) -> Any: ...

    def run(self, state: Any, unit: Unit) -> Rows:
        """The unit's rows, as JSON has them; the same whenever and wherever it runs."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What became of a unit: its rows, or why it failed, or why its worker ``died`` over it."""

    rows: Rows = field(default_factory=list)
    failed: str | None = None
    died: str | None = None


class Worker:
    """One process's share of a sweep: it prepares once, and then does unit after unit.

    It has one thread: sums do not depend on how many cores there are, and workers do not fight over them.
    """

    def __init__(self, work: Work) -> None:
        torch.set_num_threads(1)
        self.work = work
        self._state: list[Any] = []  # what was prepared, whatever that is

    def run(self, unit: Unit) -> Rows:
        if not self._state:
            self._state.append(self.work.prepare())
        rows: Rows = plain(self.work.run(self._state[0], unit))
        return rows

    def attempt(self, unit: Unit) -> Outcome:
        """The same, with an exception as text, which any process can read."""
        try:
            return Outcome(self.run(unit))
        except Exception as error:  # a unit runs models and libraries, which fail in arbitrary ways
            return Outcome(failed=in_words(error))


def in_words(error: BaseException) -> str:
    """An exception on one line; our own errors and wrong arguments explain themselves."""
    text = " ".join(str(error).split())
    explained = isinstance(error, StainlockError | ValueError) and text
    return text if explained else f"{type(error).__name__}: {text}"
