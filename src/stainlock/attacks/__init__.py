"""Attacks: what someone without the key may try, one file each, and what each leaves of a stain or a lock.

`ATTACKS` holds every attack by its name on the command line; it is put together when it is first asked for, from the
`ATTACK` or `ATTACKS` of the files here.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.catalogue import collected

__all__ = ["ATTACKS", "Attack", "Attacked", "NotApplicable", "Strength", "Subject", "all_attacks"]


@cache
def all_attacks() -> dict[str, Attack]:
    """Every attack by name: the paper's, what happens in use, a thief's; by name within each."""
    return collected(__name__, __path__, Attack, ("ATTACKS", "ATTACK"), ("paper", "use", "thief"))


def __getattr__(name: str) -> Any:
    if name == "ATTACKS":
        return all_attacks()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
