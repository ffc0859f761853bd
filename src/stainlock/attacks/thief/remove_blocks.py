"""New blocks taken out, and one gain for all their channels in their place.

Without labels a thief can't tell which gain is best: the best row of the sweep is more than he gets. With ``silence``
the layers behind them are silenced too: each gives its batch norm's mean, as if its branch had nothing to say.
"""

from __future__ import annotations

import torch

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject, number
from stainlock.attacks.thief.gate_blocks import layers_behind, taken_out
from stainlock.target import Target

SILENCE = "silence"


def silenced(target: Target) -> Target:
    """A copy whose layers behind new blocks say nothing but what they say on average."""
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
                "new blocks taken out; strength is the gain for all their channels")  # fmt: skip
