"""The paper's figures, each as a setup, its work, and a way to draw what the work found.

`FIGURES` holds every figure by its name on the command line; it is put together when it is first asked for, from the
`FIGURES` of the files here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from stainlock.catalogue import collected
from stainlock.figures.figure import Drawn, Figure, Plot, Setup, Table

__all__ = ["FIGURES", "Drawn", "Figure", "Plot", "Setup", "Table", "all_figures"]


@cache
def all_figures() -> dict[str, Figure]:
    """Every figure by name: stains, locks, example pictures, robustness; as their files list them within each."""
    return collected(__name__, __path__, Figure, ("FIGURES",), ("stain", "lock", "example", "robustness"))


def __getattr__(name: str) -> Any:
    if name == "FIGURES":
        return all_figures()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
