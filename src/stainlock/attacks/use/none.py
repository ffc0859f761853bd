"""No attack: the unchanged model, as a baseline for the others."""

from __future__ import annotations

from stainlock.attacks.attack import Attack, Attacked

ATTACK = Attack(
    "none", "use", ("stain", "lock"), "nothing", (0.0,), lambda subject, strength: Attacked(), "the unchanged model"
)
