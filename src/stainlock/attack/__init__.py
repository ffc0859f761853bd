"""Attacks: what someone without the key may try, one file each, and what each leaves of a stain or a lock.

`ATTACKS` holds every attack by its name on the command line; it is put together when it is first asked for, from the
`ATTACK` or `ATTACKS` of the files here.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from stainlock.attack.attack import Attack, Attacked, NotApplicable, Strength, Subject

__all__ = ["ATTACKS", "Attack", "Attacked", "NotApplicable", "Strength", "Subject", "all_attacks"]


@cache
def all_attacks() -> dict[str, Attack]:
    """Every attack by name: the paper's, what happens in use, a thief's; by name within each."""
    found: list[Attack] = []
    for module in pkgutil.iter_modules(__path__):
        loaded: Any = importlib.import_module(f"{__name__}.{module.name}")
        found += getattr(loaded, "ATTACKS", ()) if module.name != "attack" else ()
        found += [loaded.ATTACK] if hasattr(loaded, "ATTACK") else []
    order = {"paper": 0, "use": 1, "thief": 2}
    by_name = {attack.name: attack for attack in sorted(found, key=lambda a: order[a.group])}
    if len(by_name) != len(found):
        raise ValueError(f"expected names that differ, got {sorted(attack.name for attack in found)}")
    return by_name


def __getattr__(name: str) -> Any:
    if name == "ATTACKS":
        return all_attacks()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
