"""Every figure there is, collected from the files of this package."""

from __future__ import annotations

from functools import cache

from stainlock.catalogue import collected
from stainlock.figures.figure import Figure


@cache
def all_figures() -> dict[str, Figure]:
    """Every figure by name: stains, locks, example pictures, robustness; as their files list them within each."""
    return collected("stainlock.figures", Figure, ("FIGURES",), ("stain", "lock", "example", "robustness"))
