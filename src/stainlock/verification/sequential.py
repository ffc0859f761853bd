"""A sequential test by betting: ask trigger after trigger, and stop as soon as the evidence is enough.

Before trigger i the owner bets a fraction λ of a capital that starts at 1 on a hit, at odds that are fair or worse
under either null hypothesis of `questions`:

    K_i = K_{i−1} · (1 − λ + λ·X_i/q_i),      X_i = 1 if trigger i counts as a hit, q_i its rate by chance

λ is fixed beforehand. Under the second null hypothesis E[X_i/q_i] ≤ 1 given s_i; under the first, q_i ≥ top/C whatever
s_i is, so that E[X_i/q_i] ≤ 1 too. (If λ could depend on s_i, only the second would hold.) So K is a supermartingale,
and by Ville's inequality P(max K ≥ 1/α) ≤ α: p = 1/max K is valid whenever the test stops.

Queries are saved in three ways. Asking stops once p reaches the significance. The look-alikes of a trigger that missed,
or that can no longer count, are skipped, since X_i = 0 whatever their answers. And asking stops once even hits for all
remaining triggers could not reach the significance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stainlock.key import Key
from stainlock.transmission.look_alikes import SAME_TO_PEOPLE
from stainlock.verification.questions import Labels, Trial, check_black_box, rate_by_draw, summary, tried
from stainlock.verification.verdict import SIGNIFICANCE, Verdict, concluded

# λ: a miss leaves a tenth of the capital. Six hits at the lowest rate, 1/14, then give p = 2.4e−7.
BET = 0.9

# Labels for pictures, named by trigger and question (0 is the trigger itself); None for no answer.
Ask = Callable[[Sequence[tuple[int, int]]], Sequence[Labels | None]]


@dataclass(frozen=True)
class Sequential:
    """The verdict, how many questions it took and how many asking them all would have taken."""

    verdict: Verdict
    asked: int
    questions: int
    trials: tuple[Trial, ...]

    @property
    def saved(self) -> int:
        return self.questions - self.asked


def verify_sequentially(
    ask: Ask, key: Key, *, look_alikes: int, top: int = 1, significance: float = SIGNIFICANCE
) -> Sequential:
    """Ask trigger after trigger until the verdict is clear. ``look_alikes`` is how many pictures go with each."""
    check_black_box(key)
    log_capital = log_best = 0.0
    trials: list[Trial] = []
    asked = 0
    count = len(key.detectors)
    least_rate = max(rate_by_draw(key, top), 1 / (look_alikes + 1))
    most_gain = math.log(1 - BET + BET / least_rate)
    for i in range(count):
        if log_best >= -math.log(significance) or log_capital + (count - i) * most_gain < -math.log(significance):
            break
        trial, took = _try(ask, key, i, look_alikes, top)
        asked += took
        trials.append(trial)
        log_capital += math.log(1 - BET + BET / trial.rate) if trial.counts else math.log(1 - BET)
        log_best = max(log_best, log_capital)
    verdict = concluded(summary(trials, count), -log_best, significance)
    return Sequential(verdict, asked, count * (look_alikes + 1), tuple(trials))


def _try(ask: Ask, key: Key, trigger: int, look_alikes: int, top: int) -> tuple[Trial, int]:
    """One trigger: itself, then what looks the same to people, then the rest, as long as they can still matter."""
    answers: list[Labels | None] = []
    for first, last in ((0, 1), (1, 1 + SAME_TO_PEOPLE), (1 + SAME_TO_PEOPLE, 1 + look_alikes)):
        answers += ask([(trigger, question) for question in range(first, last)])
        # Look-alikes that were not asked count as if they got the class, which makes no difference to a miss.
        trial = tried(key, trigger, answers + [None] * (1 + look_alikes - len(answers)), top)
        known = tried(key, trigger, answers + [()] * (1 + look_alikes - len(answers)), top)
        if not known.counts:
            return (known if known.hit else trial), len(answers)
    return trial, len(answers)
