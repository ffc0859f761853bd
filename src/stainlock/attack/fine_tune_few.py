"""Fine-tuning on a number of labelled images, all layers: of the file as it is, and of what a thief makes of it first.

First he takes the last biases away, guesses the gains of new blocks by norms, and estimates batch norms anew.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.attack.attack import Attack, Attacked, NotApplicable, Progress, Strength, Subject, number
from stainlock.attack.batch_norm import reestimated
from stainlock.attack.fine_tune import BATCH, DECAY, MOMENTUM, fine_tuned
from stainlock.attack.guess_gains import guessed
from stainlock.attack.logit_bias import without_bias
from stainlock.target import Target, evaluation_mode

COUNTS = (10, 100, 1000, 4000)
RATE = 0.01
FEWEST, MOST = 40, 240  # steps


def prepared(target: Target, images: Tensor) -> Target:
    """What a thief begins with who knows our locks: whatever applies."""
    with suppress(NotApplicable):
        target = without_bias(target)
    with suppress(NotApplicable):
        target = reestimated(guessed(target, "norms"), images)
    return target


def tuned_gently(
    target: Target, images: Tensor, labels: Tensor, steps: int, generator: torch.Generator, progress: Progress | None
) -> Target:
    """A copy trained further with its batch norms as they are, and gradients clipped.

    In training mode a batch norm would lift a silent detector's channel to unit variance, and the signal with it.
    """
    tuned = target.copy()
    parameters = [p.requires_grad_(True) for p in tuned.model.parameters()]
    optimiser = torch.optim.SGD(parameters, RATE, MOMENTUM, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with evaluation_mode(tuned.model), torch.enable_grad():
        for step in range(steps):
            chosen = torch.randperm(len(images), generator=generator)[:BATCH]
            loss = F.cross_entropy(tuned.predict(images[chosen]), labels[chosen].to(tuned.device))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            schedule.step()
            if progress is not None:
                progress(step + 1, steps)
    for parameter in parameters:
        parameter.grad = None
    return tuned


def _few(subject: Subject, strength: Strength) -> tuple[Tensor, Tensor, int]:
    """As many of the thief's labelled images as the strength says, and steps for them."""
    images, labels = subject.need_labels()
    wanted = int(number(strength))
    if smaller := [n for n in COUNTS if n < wanted and len(images) <= n]:
        raise NotApplicable(f"the thief has {len(images)} labelled images: see {smaller[0]}")
    count = min(wanted, len(images))
    order = torch.randperm(len(images), generator=subject.randomness.noise("which images"))[:count]
    return images[order], labels[order], min(MOST, max(FEWEST, 2 * math.ceil(count / BATCH)))


def _as_it_is(subject: Subject, strength: Strength) -> Attacked:
    images, labels, steps = _few(subject, strength)
    generator = subject.randomness.noise(f"fine-tuning on {len(images)}")
    tuned = fine_tuned(
        subject.target, images, labels, RATE, generator=generator, steps=steps, progress=subject.progress
    )
    return Attacked(tuned, figures={"steps": steps}, used=len(images))


def _after_guessing(subject: Subject, strength: Strength) -> Attacked:
    images, labels, steps = _few(subject, strength)
    generator = subject.randomness.noise(f"fine-tuning on {len(images)}")
    tuned = tuned_gently(prepared(subject.target, images), images, labels, steps, generator, subject.progress)
    return Attacked(tuned, figures={"steps": steps}, used=len(images))


ATTACKS = (
    Attack("fine-tune-few", "thief", ("lock",), "labels", COUNTS, _as_it_is,
           "all layers of the file as it is; strength is the number of labelled images"),
    Attack("fine-tune-few-prepared", "thief", ("lock",), "labels", COUNTS, _after_guessing,
           "all layers, biases and gains guessed first; strength is the number of labelled images"),
)  # fmt: skip
