"""Attacks, one file each, and how much of a stain or a lock survives them.

`paper` holds the paper's attacks, `use` what happens to models in ordinary use, `thief` attacks by someone who knows
these locks, and `collusion` ways to merge several clients' copies, whose fingerprints `stainlock.fingerprints` traces.
`run` runs attacks (`stainlock.attack`), `measure` measures the result, `rows` and `plot` present it. `attack` defines
what an attack is, `catalogue` finds them all, and `changes` and `deployment` hold helpers that several attacks share.
"""

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.catalogue import all_attacks, all_collusions

__all__ = ["Attack", "Attacked", "NotApplicable", "Strength", "Subject", "all_attacks", "all_collusions"]
