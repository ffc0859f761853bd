"""No attack: the model as it is, which the others are compared with."""

from __future__ import annotations

from stainlock.attacks.attack import Attack, Attacked

ATTACK = Attack(
    "none", "use", ("stain", "lock"), "nothing", (0.0,), lambda subject, strength: Attacked(), "the model as it is"
)
