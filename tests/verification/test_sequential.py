"""The sequential test: valid under both null hypotheses whenever it stops, and quick if there is a stain."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import models
import numpy as np
import pytest

import validity
from stainlock import Key, stain
from stainlock.verification.questions import judged
from stainlock.verification.sequential import BET, verify_sequentially

LOOK_ALIKES = 13
Answer = Callable[[int, int], int]
Suspect = Callable[[np.random.Generator, Key], Answer]


@pytest.fixture(scope="module")
def key() -> Key:
    return stain(models.conv_net(), schema="output", count=6, seed=3)[1]


def with_classes(key: Key, classes: list[int], total: int, drawn: bool = True) -> Key:
    """The key as if the seed had given these classes; `check_secrets`, which would refuse it, is tested elsewhere."""
    details = {"classes": classes, "total_classes": total, "random_classes": drawn, "candidates": 1}
    return dataclasses.replace(key, details=details)


@pytest.fixture(autouse=True)
def _any_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stainlock.verification.questions.check_secrets", lambda key: None)


def asked(key: Key, answer: Answer, significance: float = 1e-6) -> tuple[float, int, int]:
    seen: list[tuple[int, int]] = []

    def ask(questions: Sequence[tuple[int, int]]) -> list[list[int]]:
        seen.extend(questions)
        return [[answer(*one)] for one in questions]

    found = verify_sequentially(ask, key, look_alikes=LOOK_ALIKES, significance=significance)
    assert found.asked == len(seen) == len(set(seen))
    assert found.saved == len(key.detectors) * (LOOK_ALIKES + 1) - found.asked
    return found.verdict.p_value, found.asked, len(found.trials)


def test_hits_multiply_the_capital_and_stop_when_they_are_enough(key: Key) -> None:
    many = dataclasses.replace(key, detectors=key.detectors * 2)
    classes = [i + 1 for i in range(12)]
    own = with_classes(many, classes, 1000)
    p, queries, triggers = asked(own, lambda i, q: classes[i] if q == 0 else 0)
    gain = 1 - BET + BET * 14
    assert triggers == math.ceil(math.log(1e6) / math.log(gain)) == 6
    assert queries == 6 * 14
    assert p == pytest.approx(gain**-6)


def test_a_miss_costs_one_query_and_hopeless_cases_are_given_up(key: Key) -> None:
    own = with_classes(key, [1] * 6, 1000)
    p, queries, triggers = asked(own, lambda i, q: 0)
    assert (p, queries, triggers) == (1.0, 1, 1), "five hits could not reach 1e-6 after one miss"
    p, queries, triggers = asked(own, lambda i, q: 0, significance=0.5)
    assert p == 1.0
    assert queries == triggers


def test_what_looks_alike_to_people_makes_a_hit_worthless(key: Key) -> None:
    own = with_classes(key, [1] * 6, 1000)
    _, queries, triggers = asked(own, lambda i, q: 1, significance=1e-3)
    assert queries == 4 * triggers, "three look-alikes decide; the other ten are not asked"


def test_a_hit_pays_by_how_many_of_its_pictures_are_given_the_class(key: Key) -> None:
    own = with_classes(key, [1] * 6, 1000)
    p, _, _ = asked(own, lambda i, q: 1 if q in (0, LOOK_ALIKES) else 0, significance=1e-3)
    assert p == pytest.approx((1 - BET + BET * 14 / 2) ** -4), "two of fourteen: half of what one of fourteen pays"


def test_a_hit_that_people_would_expect_pays_nothing(key: Key) -> None:
    own = with_classes(key, [1] * 6, 1000)
    p, _, _ = asked(own, lambda i, q: 1 if q <= 2 else 0, significance=1e-3)
    assert p == 1.0, "three of fourteen, two of them alike to people"


def _rates(
    answers: Callable[[np.random.Generator, Key], Answer], key: Key, drawn: bool, runs: int = 4000
) -> list[float]:
    noise = np.random.default_rng(0)
    found = []
    for _ in range(runs):
        own = with_classes(key, noise.integers(0, 4, 6).tolist(), 4, drawn)
        found.append(asked(own, answers(noise, own), significance=0.02)[0])
    return found


def _distinct_trigger(noise: np.random.Generator, key: Key) -> Answer:
    """Null hypothesis 1 at its worst: a trigger's answer, fixed before the class, differs from all its look-alikes'."""
    return lambda i, q: 3 if q == 0 else 100 + q


def _one_of_fourteen(noise: np.random.Generator, key: Key) -> Answer:
    """Null hypothesis 2: of each trigger's fourteen pictures, a random one is given the class."""
    lucky = noise.integers(0, 14, 6)
    return lambda i, q: int(key.details["classes"][i]) if q == lucky[i] else -5


@pytest.mark.parametrize(("answers", "drawn"), [(_distinct_trigger, True), (_one_of_fourteen, False)])
def test_p_values_are_valid_under_both_null_hypotheses(key: Key, answers: Suspect, drawn: bool) -> None:
    found = np.array(_rates(answers, key, drawn))
    assert not validity.refuted(found), {level: float((found <= level).mean()) for level in validity.LEVELS}
    assert (found < 0.5).any(), "some are lucky: the test could fail"


def test_without_the_rate_of_the_draw_it_would_not_be_valid(key: Key) -> None:
    """The same answers with odds of 14 to 1 where 4 to 1 is fair: why the rate of the draw is needed."""
    found = np.array(_rates(_distinct_trigger, key, drawn=False))
    assert validity.refuted(found)


def test_all_answers_together_agree(key: Key) -> None:
    classes = [1, 2, 3, 4, 5, 6]
    own = with_classes(key, classes, 1000)
    verdict = judged(own, [[[c], *([[0]] * LOOK_ALIKES)] for c in classes])
    assert verdict.stained
    assert verdict.p_value == pytest.approx(14.0**-6)
    # a class among the first five labels is five times as likely by chance; 1/14 is still the larger rate
    five = judged(own, [[[0, 0, 0, 0, c], *([[0]] * LOOK_ALIKES)] for c in classes], top=5)
    assert five.p_value == pytest.approx(14.0**-6)
    assert not judged(own, [[[0, c], *([[0]] * LOOK_ALIKES)] for c in classes]).stained
    few = with_classes(key, classes, 10)
    answers = [[[0, 0, 0, 0, c], *([[0]] * LOOK_ALIKES)] for c in classes]
    assert judged(few, answers, top=5).p_value == pytest.approx(0.5**6)
    assert judged(own, [[None, *([[0]] * LOOK_ALIKES)]] * 6).p_value == 1.0
    assert judged(own, [[[c], *([None] * LOOK_ALIKES)] for c in classes]).p_value == 1.0
