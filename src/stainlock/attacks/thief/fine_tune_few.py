"""Fine-tuning of all layers on a few labelled images: of the file itself, or after preparing it.

Preparation removes the last layer's biases, guesses the gains of inserted blocks by norms and re-estimates batch norms.
For a keyed lock, the file is trained without its gates: with them, every image would get a different channel order.
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
    """The starting point of a thief who knows our locks: every preparation that applies."""
    target = without_gates(target)
    with suppress(NotApplicable):
        target = without_bias(target)
    with suppress(NotApplicable):
        target = reestimated(guessed(target, "norms"), images)
    return target


def _few(subject: Subject, strength: Strength) -> tuple[Pictures, Tensor, int]:
    """A random subset of the thief's labelled images, its size given by the strength, and the number of steps."""
    images, labels = subject.need_labels()
    wanted = int(number(strength))
    if smaller := [n for n in COUNTS if n < wanted and len(images) <= n]:
        raise NotApplicable(f"the thief has only {len(images)} labelled images: see strength {smaller[0]}")
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
           "fine-tune all layers of the file; strength is the number of labelled images"),
    Attack("fine-tune-few-prepared", "thief", ("lock",), "labels", COUNTS, _after_guessing,
           "guess biases and gains, then fine-tune all layers; strength is the number of labelled images"),
)  # fmt: skip
