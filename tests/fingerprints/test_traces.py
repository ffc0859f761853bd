"""Tracing: the bound holds for innocents, whatever the suspect; members of coalitions are named."""

from __future__ import annotations

import numpy as np
import pytest

from stainlock.fingerprints import Reading, code, trace
from stainlock.fingerprints.streams import packed_codes, signs
from stainlock.fingerprints.tracing import log10_p_value, scores, threshold_for

pytest.importorskip("cryptography")

CHIPS = 2048


def secret(number: int) -> bytes:
    return number.to_bytes(32, "big")


def reading(chips: np.ndarray) -> Reading:
    return Reading(chips, 10**6, 10**6, {})


def suspects() -> dict[str, np.ndarray]:
    """Readings that are as unlike noise as can be: none of them was made with an innocent's code."""
    random = np.random.default_rng(0)
    heavy = random.standard_t(1.5, CHIPS)
    return {
        "constant": np.ones(CHIPS),
        "one chip": np.eye(CHIPS)[3],
        "few chips": np.repeat([1.0, 0.0], [9, CHIPS - 9]),
        "heavy tails": heavy,
        "a guilty client": code(secret(10**6), CHIPS) + 0.1 * heavy,
        "a ramp": np.linspace(-1, 1, CHIPS),
    }


@pytest.mark.parametrize("name", suspects())
def test_innocents_stay_below_the_bound(name: str) -> None:
    """P(z > t) ≤ exp(−t²/2), counted over 20,000 codes, with a margin of 4 standard deviations."""
    chips = suspects()[name]
    z = scores(chips / np.linalg.norm(chips), packed_codes(map(secret, range(20_000)), CHIPS))
    for t in (1.0, 1.5, 2.0, 2.5, 3.0):
        bound = np.exp(-t * t / 2)
        assert np.mean(z > t) <= bound + 4 * np.sqrt(bound / len(z)), t
    assert z.mean() == pytest.approx(0, abs=0.05)
    assert z.std() == pytest.approx(1, abs=0.05)


def test_the_bound_would_fail_for_codes_that_know_the_suspect() -> None:
    """The same count refutes the bound if codes depend on the reading: a fifth of the signs are copied from it."""
    random = np.random.default_rng(1)
    chips = suspects()["heavy tails"]
    own = signs(packed_codes(map(secret, range(500)), CHIPS))
    known = np.where(random.random(own.shape) < 0.2, np.sign(chips), own)
    z = known @ chips / np.linalg.norm(chips)
    assert np.mean(z > 3) > 0.5 > np.exp(-4.5)


@pytest.mark.parametrize("colluders", [1, 2, 10, 20])
def test_members_of_a_coalition_are_named_and_no_one_else(colluders: int) -> None:
    mixed = np.mean([code(secret(i), CHIPS) for i in range(colluders)], axis=0)
    found = trace(reading(mixed), map(secret, range(1000)))
    assert {a.client for a in found.accused} == set(range(colluders))
    assert all(a.p_value <= 1e-6 for a in found.accused)
    assert found.tested == 1000
    assert np.flatnonzero(found.scores > found.threshold).max() < colluders


def test_clients_are_named_by_their_place_among_thousands() -> None:
    mixed = code(secret(3), 1024) + code(secret(4500), 1024)
    found = trace(reading(mixed), map(secret, range(5000)))
    assert {a.client for a in found.accused} == {3, 4500}


def test_the_second_round_names_a_minor_member() -> None:
    mixed = code(secret(0), CHIPS) + 0.12 * code(secret(1), CHIPS)
    found = trace(reading(mixed), map(secret, range(1000)))
    assert {(a.client, a.round) for a in found.accused} == {(0, 1), (1, 2)}
    assert found.scores[1] < found.threshold < min(a.z for a in found.accused)


def test_a_level_is_kept_over_many_traces() -> None:
    """At a level of 0.3, of 400 suspects with a guilty client, at most three tenths accuse an innocent."""
    wrong = 0
    for suspect in range(400):
        mixed = code(secret(10**6 + suspect), 1024) + 0.5 * np.random.default_rng(suspect).normal(size=1024)
        innocent = trace(reading(mixed), map(secret, range(50 * suspect, 50 * suspect + 50)), level=0.3)
        wrong += len(innocent.accused) > 0
    assert wrong <= 0.3 * 400


def test_p_values_are_corrected_for_clients_and_rounds() -> None:
    t = threshold_for(10**6, 1e-6)
    assert 10 ** log10_p_value(t, 10**6) == pytest.approx(1e-6)
    assert t == pytest.approx(np.sqrt(2 * np.log(4e12)))
    assert log10_p_value(1.0, 10) == log10_p_value(0.0, 10) == 0
    assert log10_p_value(-9.0, 10) == log10_p_value(9.0, 10) < 0
    assert log10_p_value(100.0, 10**6) < -2000
    some = trace(reading(np.ones(CHIPS)), map(secret, range(10)), clients=10**6)
    assert (some.tested, some.threshold) == (10, pytest.approx(t))


def test_nothing_read_names_no_one() -> None:
    assert trace(reading(np.zeros(CHIPS)), map(secret, range(10))).accused == ()
    assert trace(reading(np.ones(CHIPS)), []).accused == ()


def test_a_member_whose_copy_was_subtracted_is_named() -> None:
    found = trace(reading(2 * code(secret(4), CHIPS) - code(secret(5), CHIPS)), map(secret, range(100)))
    assert {(a.client, a.z > 0, a.round) for a in found.accused} == {(4, True, 1), (5, False, 1)}
