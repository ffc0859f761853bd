"""Fine-tuning on a number of labelled images, all layers: of the file as it is, and of what a thief makes of it first.

First he takes the last biases away, guesses the gains of new blocks by norms, and estimates batch norms anew. Of a
keyed lock he trains the file without its gates: with them, every image would get an order of its own.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject, number
from stainlock.attacks.paper.fine_tune import BATCH, fine_tuned
from stainlock.attacks.pixels import Pictures, subset
from stainlock.attacks.thief.batch_norm import reestimated
from stainlock.attacks.thief.guess_gains import guessed
from stainlock.attacks.thief.keyed_gates import without_gates
from stainlock.attacks.thief.logit_bias import without_bias
from stainlock.target import Target

COUNTS = (10, 100, 1000, 4000)
RATE = 0.01
FEWEST, MOST = 40, 240  # steps


def prepared(target: Target, images: Pictures) -> Target:
    """What a thief begins with who knows our locks: whatever applies."""
    target = without_gates(target)
    with suppress(NotApplicable):
        target = without_bias(target)
    with suppress(NotApplicable):
        target = reestimated(guessed(target, "norms"), images)
    return target


def _few(subject: Subject, strength: Strength) -> tuple[Pictures, Tensor, int]:
    """As many of the thief's labelled images as the strength says, and steps for them."""
    images, labels = subject.need_labels()
    wanted = int(number(strength))
    if smaller := [n for n in COUNTS if n < wanted and len(images) <= n]:
        raise NotApplicable(f"the thief has {len(images)} labelled images: see {smaller[0]}")
    count = min(wanted, len(images))
    order = torch.randperm(len(images), generator=subject.randomness.noise("which images"))[:count]
    return subset(images, order), labels[order], min(MOST, max(FEWEST, 2 * math.ceil(count / BATCH)))


def _as_it_is(subject: Subject, strength: Strength) -> Attacked:
    images, labels, steps = _few(subject, strength)
    generator = subject.randomness.noise(f"fine-tuning on {len(images)}")
    tuned = fine_tuned(
        without_gates(subject.target), images, labels, RATE, generator=generator, steps=steps, progress=subject.progress
    )
    return Attacked(tuned, figures={"steps": steps}, used=len(images))


def _after_guessing(subject: Subject, strength: Strength) -> Attacked:
    images, labels, steps = _few(subject, strength)
    generator = subject.randomness.noise(f"fine-tuning on {len(images)}")
    tuned = fine_tuned(prepared(subject.target, images), images, labels, RATE, generator=generator, steps=steps,
                       gently=True, progress=subject.progress)  # fmt: skip
    return Attacked(tuned, figures={"steps": steps}, used=len(images))


ATTACKS = (
    Attack("fine-tune-few", "thief", ("lock",), "labels", COUNTS, _as_it_is,
           "all layers of the file as it is; strength is the number of labelled images"),
    Attack("fine-tune-few-prepared", "thief", ("lock",), "labels", COUNTS, _after_guessing,
           "all layers, biases and gains guessed first; strength is the number of labelled images"),
)  # fmt: skip
