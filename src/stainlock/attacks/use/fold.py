"""Batch norms folded into the convolutions before them, as exporters do."""

from __future__ import annotations

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.deployment import folded


def _run(subject: Subject, strength: Strength) -> Attacked:
    changed, count = folded(subject.target)
    if not count:
        raise NotApplicable("no batch norm of this model follows a convolution")
    return Attacked(changed, note=f"{count} batch norms folded")


ATTACK = Attack(
    "fold-batch-norm", "use", ("stain", "lock"), "nothing", (1.0,), _run, "fold batch norms into convolutions"
)
