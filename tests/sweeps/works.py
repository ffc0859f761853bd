"""Small work for sweeps, in a module of its own, so that other processes can import it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import stainlock
from stainlock.errors import ModelError
from stainlock.sweeps import Unit


@dataclass(frozen=True)
class Sums:
    """Each unit sums numbers drawn from its own seed; ``trace`` gets a line for every unit that was begun.

    ``killed`` units kill their worker so many times; ``broken`` ones raise.
    """

    trace: str
    count: int = 6
    seconds: float = 0.0
    scale: float = 1.0
    killed: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    def units(self) -> list[Unit]:
        return [Unit(f"layer-{i}", {"layer": i}) for i in range(self.count)]

    def identity(self) -> dict[str, Any]:
        return {"work": "sums", "scale": self.scale, "shape": (3, 4)}

    def prepare(self) -> float:
        assert hasattr(stainlock, "Target"), "work expects the library"
        return self.scale

    def run(self, state: float, unit: Unit) -> list[dict[str, Any]]:
        with Path(self.trace).open("a") as file:
            file.write(f"{unit.name} {os.getpid()}\n")
        time.sleep(self.seconds)
        if len(begun(self.trace, unit.name)) <= self.killed.get(unit.name, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        match self.broken.get(unit.name):
            case "ours":
                raise ModelError("no such layer")
            case "theirs":
                raise RuntimeError("shapes\ndiffer")
            case "rows":
                return [{"layer": torch.zeros(1)}]
        draw = torch.randn(100_000, generator=torch.Generator().manual_seed(unit.facts["layer"]))
        return [{**unit.facts, "part": part, "sum": state * float(draw[part::2].sum())} for part in range(2)]


def begun(trace: str | Path, unit: str | None = None) -> list[str]:
    """The units that were begun, in order, as often as they were; or the processes that began one of them."""
    lines = [line.split() for line in Path(trace).read_text().splitlines()] if Path(trace).exists() else []
    return [name for name, _ in lines] if unit is None else [pid for name, pid in lines if name == unit]
