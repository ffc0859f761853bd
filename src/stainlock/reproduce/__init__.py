"""The paper's figures, each as a setup, its work, and a way to draw what the work found.

`FIGURES` holds every figure by its name on the command line; it is put together when it is first asked for, from the
`FIGURES` of the files here.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from stainlock.reproduce.figure import Drawn, Figure, Plot, Setup, Table

__all__ = ["FIGURES", "Drawn", "Figure", "Plot", "Setup", "Table", "all_figures"]
_GROUPS = ("stain", "lock", "example", "robustness")


@cache
def all_figures() -> dict[str, Figure]:
    """Every figure by name: stains, locks, example pictures, robustness; as their files list them within each."""
    found: list[Figure] = []
    for module in pkgutil.iter_modules(__path__):
        loaded: Any = importlib.import_module(f"{__name__}.{module.name}")
        found += getattr(loaded, "FIGURES", ())
    by_name = {figure.name: figure for figure in sorted(found, key=lambda f: _GROUPS.index(f.group))}
    if len(by_name) != len(found):
        raise ValueError(f"expected names that differ, got {sorted(figure.name for figure in found)}")
    return by_name


def __getattr__(name: str) -> Any:
    if name == "FIGURES":
        return all_figures()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
