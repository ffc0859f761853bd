"""The questions that a black box is asked, and the p-value of its answers.

For each trigger there are m + 1 questions: the trigger itself and its m look-alikes, all as 8-bit pictures, the same
however the suspect is queried. An answer is a list of labels, best first. An image gets the class if that is among the
first ``top`` labels of the answer.

There are two null hypotheses, and the p-value is valid under both. The first: the suspect's answers are independent of
the classes, which the seed drew. Then trigger i gets its class with probability top/C. The second: the class suits the
trigger by itself, as an image's own label does, no better than it suits the trigger's look-alikes, which are mirrored,
recoloured, paler or blurred. If s of these m + 1 images get the class, the trigger is then one of them with probability
s/(m+1). The larger of the two probabilities is trial i's rate; if the owner chose the classes, only the second applies.

What people see in a natural image is still there in a mirrored, a paler and a blurred copy, but hardly in the other
look-alikes, so a natural image would stand out from those. So a trigger counts as a miss if most of these three copies
get its class too.

A question without an answer counts against the stain: for a trigger as a miss, for a look-alike as if it got the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.certificates import log_poisson_binomial_tail
from stainlock.facts import OutputFacts
from stainlock.key import Key, placeholder_target
from stainlock.stains.secrets import check_secrets, class_rate, classes_are_drawn
from stainlock.transmission.look_alikes import SAME_TO_PEOPLE, look_alikes
from stainlock.verification.verdict import SIGNIFICANCE, Verdict, concluded

Labels = Sequence[int]  # an answer: labels, best first
Answers = Sequence[Sequence[Labels | None]]  # for each trigger: its own answer, then those of its look-alikes


def check_black_box(key: Key) -> None:
    """Refuse a key that outputs alone can't verify."""
    key.check_stain("verify")
    if key.schema != "output":
        raise ValueError(f"expected a key of schema output for a black-box verification, got schema {key.schema!r}")
    check_secrets(key)


def pictures(key: Key) -> Tensor:
    """Every question as 8-bit levels: ``(triggers, m + 1, *input_shape)``."""
    target = placeholder_target(key)
    grey = sum(target.bounds) / 2
    images = [d.trigger.pixels(target)[0] for d in key.detectors]
    return target.to_bytes(torch.stack([torch.stack([image, *look_alikes(image, grey)]) for image in images]))


@dataclass(frozen=True)
class Trial:
    """One trigger's outcome: whether it got its class, whether that counts, and its rate by chance."""

    hit: bool
    counts: bool
    rate: float


def tried(key: Key, trigger: int, answers: Sequence[Labels | None], top: int = 1) -> Trial:
    """The outcome for one trigger, from the answers for it and its look-alikes."""
    wanted = OutputFacts.of(key).classes[trigger]
    hit = answers[0] is not None and wanted in answers[0][:top]
    given = [labels is None or wanted in labels[:top] for labels in answers[1:]]
    natural = sum(given[:SAME_TO_PEOPLE]) > SAME_TO_PEOPLE / 2
    like_variants = (sum(given) + hit) / len(answers)
    return Trial(hit, hit and not natural, min(1.0, max(like_variants, rate_by_draw(key, top))))


def rate_by_draw(key: Key, top: int = 1) -> float:
    """The chance that a class drawn by the seed is among ``top`` labels; 0 if the seed did not draw the classes."""
    return min(1.0, top * class_rate(key)) if classes_are_drawn(key) else 0.0


def judged(key: Key, answers: Answers, *, top: int = 1, significance: float = SIGNIFICANCE) -> Verdict:
    """The verdict from all answers together: the number of hits in trials with these rates."""
    check_black_box(key)
    trials = [tried(key, i, own, top) for i, own in enumerate(answers)]
    log_p = log_poisson_binomial_tail(sum(t.counts for t in trials), [t.rate for t in trials])
    return concluded(summary(trials, len(key.detectors)), log_p, significance)


def summary(trials: Sequence[Trial], triggers: int) -> Verdict:
    """A verdict without its p-value."""
    hits = sum(t.hit for t in trials)
    note = f"{hits} of {len(trials)} triggers hit"
    if len(trials) < triggers:
        note += f"; {triggers - len(trials)} were not asked"
    if shared := hits - sum(t.counts for t in trials):
        note += f"; {shared} of these don't count: their look-alikes get the class too"
    return Verdict(False, 1.0, 0.0, hits / max(1, len(trials)), "output", note=note)
