"""All figures, collected from the files of this package."""

from __future__ import annotations

from functools import cache

from stainlock.catalogue import collected
from stainlock.figures.figure import Figure


@cache
def all_figures() -> dict[str, Figure]:
    """Every figure by name: stains, locks, examples, robustness; within a group, in the order of their files."""
    return collected("stainlock.figures", Figure, ("FIGURES",), ("stain", "lock", "example", "robustness"))
