"""The paper's figures. Each has a setup, the work that measures it, and a function that draws the measured rows.

`FIGURES` maps names, as on the command line, to figures. It is collected from the `FIGURES` of the modules in this
package when it is first used.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from stainlock.catalogue import collected
from stainlock.figures.figure import Drawn, Figure, Plot, Setup, Table

__all__ = ["FIGURES", "Drawn", "Figure", "Plot", "Setup", "Table", "all_figures"]


@cache
def all_figures() -> dict[str, Figure]:
    """Every figure by name: stains, locks, example pictures, robustness; within each, in the order of its module."""
    return collected(__name__, __path__, Figure, ("FIGURES",), ("stain", "lock", "example", "robustness"))


def __getattr__(name: str) -> Any:
    if name == "FIGURES":
        return all_figures()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
