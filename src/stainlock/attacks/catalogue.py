"""Every attack and collusion, collected from the files of this package."""

from __future__ import annotations

from functools import cache

from stainlock.attacks.attack import Attack
from stainlock.attacks.collusion.coalition import Collusion
from stainlock.catalogue import collected


@cache
def all_attacks() -> dict[str, Attack]:
    """Every attack by name: the paper's, then those of ordinary use, then a thief's; by file name within each group."""
    return collected("stainlock.attacks", Attack, ("ATTACKS", "ATTACK"), ("paper", "use", "thief"))


@cache
def all_collusions() -> dict[str, Collusion]:
    """Every way to merge several clients' copies into one file, by name."""
    return collected("stainlock.attacks", Collusion, ("COLLUSIONS", "COLLUSION"), ("collusion",))
