"""New blocks taken out, and one gain for all their channels in their place.

Without labels a thief can't tell which gain is best: the best row of the sweep is more than he gets.
"""

from __future__ import annotations

from stainlock.attack.attack import Attack, Attacked, Strength, Subject, number
from stainlock.attack.gate_blocks import taken_out


def _run(subject: Subject, strength: Strength) -> Attacked:
    gain = number(strength)
    return Attacked(taken_out(subject.target, lambda _: gain))


ATTACK = Attack("remove-blocks", "thief", ("lock",), "nothing", (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), _run,
                "new blocks taken out; strength is the gain for all their channels")  # fmt: skip
