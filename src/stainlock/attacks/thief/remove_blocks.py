"""Inserted blocks removed, with one gain for all their channels instead.

Without labels a thief can't know which gain is best, so the best row of the sweep overestimates the attack. With
``silence`` the layers behind the blocks are silenced too: each outputs its mean, so its branch carries no information.
"""

from __future__ import annotations

import torch

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject, number
from stainlock.attacks.thief.gate_blocks import layers_behind, taken_out
from stainlock.target import Target

SILENCE = "silence"


def silenced(target: Target) -> Target:
    """A copy in which the layers behind inserted blocks always output their mean."""
    stolen = taken_out(target, lambda _: 0.0)
    for layer in layers_behind(target):
        layer.expect(stolen.model, torch.zeros(len(layer.taps)))
    return stolen


def _run(subject: Subject, strength: Strength) -> Attacked:
    if strength == SILENCE:
        return Attacked(silenced(subject.target))
    gain = number(strength)
    return Attacked(taken_out(subject.target, lambda _: gain))


ATTACK = Attack("remove-blocks", "thief", ("lock",), "nothing", (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, SILENCE), _run,
                "remove inserted blocks; strength is the gain for all their channels")  # fmt: skip
