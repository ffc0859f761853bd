"""Attacks: what someone without the key may try, one file each, and what each leaves of a stain or a lock.

`paper` holds the paper's, `use` what happens to models in use, `thief` what someone tries who knows these locks,
`collusion` what clients make of several copies, whose fingerprints `stainlock.fingerprints` traces. `run`
runs them (`stainlock.attack`), `measure` measures what is left, `rows` and `plot` show it; `attack` says what an attack
is, `catalogue` finds them all, `changes` and `deployment` are what several do to a model.
"""

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.catalogue import all_attacks, all_collusions

__all__ = ["Attack", "Attacked", "NotApplicable", "Strength", "Subject", "all_attacks", "all_collusions"]
