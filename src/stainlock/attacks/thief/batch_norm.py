"""Batch norms re-estimated on the thief's images, without labels.

Either on the locked model itself, or after removing the inserted blocks and guessing their gains (`guess_gains`). A
re-estimated batch norm undoes any scale and shift that a lock has put on channels.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.pixels import Pictures
from stainlock.attacks.thief.gate_blocks import taken_out
from stainlock.attacks.thief.guess_gains import guessed
from stainlock.attacks.thief.keyed_gates import without_gates
from stainlock.target import Target, evaluation_mode

_BATCH = 64


def reestimated(target: Target, images: Pictures) -> Target:
    """A copy with batch-norm statistics averaged over batches of these images."""
    fresh = target.copy()
    norms = [m for m in fresh.model.modules() if isinstance(m, _BatchNorm) and m.running_var is not None]
    if not norms:
        raise NotApplicable("no batch norm in this model")
    usual = [norm.momentum for norm in norms]
    with evaluation_mode(fresh.model), torch.no_grad():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum, norm.training = None, True  # None: the plain average over batches
        for batch in images.split(_BATCH):
            if len(batch) > 1:
                fresh.run_traced(batch)
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
    return fresh


def _run(subject: Subject, strength: Strength) -> Attacked:
    images, target = subject.need_images(), without_gates(subject.target)
    if strength == "blocks-out":
        target = taken_out(target, lambda _: 1.0)
    elif strength != "as-it-is":
        target = guessed(target, str(strength))
    return Attacked(reestimated(target, images))


ATTACK = Attack("reestimate-batch-norm", "thief", ("lock",), "images",
                ("as-it-is", "blocks-out", "norms", "energies"), _run,
                "re-estimate batch norms; strength is what is done to inserted blocks first")  # fmt: skip
