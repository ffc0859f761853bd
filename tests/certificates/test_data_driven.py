"""Theorem 2, Clopper–Pearson and the bound on a mean: their values, and how often the truth exceeds them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from stainlock.certificates import clopper_pearson, mean_upper_bound, theorem2, theorem2_coverage

unhurried = settings(deadline=None, max_examples=40)
COUNTS = st.integers(2, 10**6).flatmap(lambda m: st.tuples(st.integers(0, m), st.just(m)))


def objective(epsilon, n, m):
    return ((m - n) / m - epsilon) * (1 - 2 * np.exp(-2 * m * epsilon**2))


@pytest.mark.parametrize(("samples", "by_theorem", "exact"), [(2000, 0.043, 0.0015), (100_000, 0.0069, 0.00003)])
def test_the_known_values_without_exceedances(samples, by_theorem, exact):
    assert theorem2(0, samples) == pytest.approx(by_theorem, rel=0.01)
    assert clopper_pearson(0, samples, 0.95) == pytest.approx(exact, rel=0.01)
    assert clopper_pearson(0, samples, 0.95) == pytest.approx(1 - 0.05 ** (1 / samples), rel=1e-10)


@unhurried
@given(counts=COUNTS)
def test_theorem2_finds_the_true_supremum(counts):
    n, m = counts
    bound = theorem2(n, m)
    smallest = math.sqrt(math.log(2) / (2 * m))
    largest = (m - n) / m
    if largest <= smallest:
        assert bound == 1
        return
    near = np.clip(smallest * np.linspace(1, 12, 2001), smallest, largest)
    grid = np.concatenate([np.linspace(smallest, largest, 2001), near])
    best = float(np.max(objective(grid, n, m)))
    assert bound <= 1 - best + 1e-12  # at least as good as any ε of the grid
    assert bound >= 1 - best - 1e-4 * best  # and no better than its neighbourhood allows


def test_the_printed_supremum_bounds_a_sure_event_below_one():
    # Every input exceeds Δ, so p = 1 and n = m always; two negative factors bring the printed bound below p.
    for m in (2, 10, 2000):
        printed = 1 - np.max(objective(np.linspace(1e-6, 1, 100_001), m, m))
        assert printed < 1
        assert theorem2(m, m) == 1


@unhurried
@given(m=st.integers(2, 3000), confidence=st.floats(0.01, 0.999))
def test_bounds_grow_with_the_exceedances_and_lie_above_the_observed_rate(m, confidence):
    n = np.arange(m + 1)
    for bound in (theorem2(n, m), clopper_pearson(n, m, confidence)):
        assert np.all((bound >= 0) & (bound <= 1))
        assert np.all(np.diff(bound) >= 0)
        assert bound[-1] == 1
    assert np.all(theorem2(n, m) >= n / m)
    assert np.all(clopper_pearson(n, m, max(confidence, 0.7)) >= n / m)


def test_more_samples_and_less_confidence_give_smaller_bounds():
    sizes = [2, 5, 20, 100, 10**4, 10**6, 10**9]
    for bounds in ([theorem2(0, m) for m in sizes], [clopper_pearson(0, m, 0.95) for m in sizes]):
        assert bounds == sorted(bounds, reverse=True)
    by_confidence = [clopper_pearson(3, 100, c) for c in (0.5, 0.9, 0.99, 0.999999)]
    assert by_confidence == sorted(by_confidence)


@unhurried
@given(counts=COUNTS, confidence=st.floats(1e-6, 1 - 1e-9))
def test_clopper_pearson_solves_the_binomial_tail(counts, confidence):
    n, m = counts
    bound = clopper_pearson(n, m, confidence)
    if n < m:
        assert stats.binom.cdf(n, m, bound) == pytest.approx(1 - confidence, rel=1e-6)
    else:
        assert bound == 1


@pytest.mark.parametrize("samples", [2, 7, 60, 400])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_clopper_pearson_covers_every_rate(samples, confidence):
    n = np.arange(samples + 1)
    bound = clopper_pearson(n, samples, confidence)
    for p in np.concatenate([np.linspace(0, 1, 201), bound * (1 + 1e-9)]):
        if p <= 1:  # the exact probability of a sample whose bound is below p
            assert np.sum(stats.binom.pmf(n, samples, p)[bound < p]) <= (1 - confidence) * (1 + 1e-6)


@pytest.mark.parametrize("samples", [2, 7, 60, 400])
def test_the_coverage_of_theorem2_is_the_worst_over_all_rates(samples):
    n = np.arange(samples + 1)
    bound = theorem2(n, samples)
    rates = np.unique(np.clip(np.concatenate([np.linspace(0, 1, 501), bound * (1 + 1e-9)]), 0, 1))
    covered = min(1 - np.sum(stats.binom.pmf(n, samples, p)[bound < p]) for p in rates)
    assert theorem2_coverage(samples) == pytest.approx(covered, abs=1e-6)


def test_theorem2_holds_at_95_percent_for_every_sample_size():
    assert all(theorem2_coverage(m) > 0.95 for m in [*range(2, 100), 1000, 20_000])
    assert theorem2_coverage(2000) == pytest.approx(0.99986, abs=1e-5)


@pytest.mark.parametrize("samples", [2, 10, 100, 2000])
def test_clopper_pearson_is_never_above_theorem2_at_the_confidence_that_theorem2_has(samples):
    n = np.arange(samples + 1)
    for confidence in (0.95, theorem2_coverage(samples)):
        assert np.all(clopper_pearson(n, samples, confidence) <= theorem2(n, samples) * (1 + 1e-9))


def test_a_threshold_at_the_largest_response_keeps_its_confidence():
    largest = np.random.default_rng(0).random((4000, 50)).max(axis=1)  # responses uniform on [0, 1]
    missed = np.mean(1 - largest > clopper_pearson(0, 50, 0.9))
    assert missed == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 4000))


VARIABLES = {
    "rare": (lambda rng, m: (rng.random(m) < 0.02).astype(float), 0.02),
    "even": (lambda rng, m: (rng.random(m) < 0.5).astype(float), 0.5),
    "nearly sure": (lambda rng, m: (rng.random(m) < 0.97).astype(float), 0.97),
    "uniform": (lambda rng, m: rng.random(m), 0.5),
    "skewed": (lambda rng, m: rng.beta(0.05, 0.95, m), 0.05),
    "log-uniform": (lambda rng, m: 10 ** rng.uniform(-8, 0, m), (1 - 1e-8) / (8 * math.log(10))),
}


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("samples", [2, 60])
def test_the_bound_on_a_mean_covers(name, samples):
    draw, mean = VARIABLES[name]
    rng = np.random.default_rng(samples)
    runs, confidence = 150, 0.8
    missed = np.mean([mean_upper_bound(draw(rng, samples), confidence) < mean for _ in range(runs)])
    assert missed <= (1 - confidence) + 4 * math.sqrt(0.16 / runs)


@unhurried
@given(
    values=st.lists(st.floats(0, 1), min_size=2, max_size=40),
    confidence=st.floats(0.01, 0.999),
    seed=st.integers(0, 100),
)
def test_the_bound_on_a_mean_is_above_it_and_ignores_order(values, confidence, seed):
    x = np.array(values)
    bound = mean_upper_bound(x, confidence)
    assert np.mean(x) <= bound <= 1
    shuffled = np.random.default_rng(seed).permutation(x)
    assert mean_upper_bound(shuffled, confidence) == pytest.approx(bound, rel=1e-7)
    distinct, counts = np.unique(x, return_counts=True)
    assert mean_upper_bound(distinct, confidence, counts=counts) == pytest.approx(bound, rel=1e-7)
    assert mean_upper_bound(np.minimum(x + 0.1, 1), confidence) >= bound * (1 - 1e-7)


@pytest.mark.parametrize("samples", [100, 10_000])
def test_tiny_values_leave_only_the_price_of_the_sample(samples):
    for alpha in (0.05, 1e-6):
        bound = mean_upper_bound(np.full(samples, 1e-200), 1 - alpha)
        assert -math.expm1(math.log(alpha) / samples) <= bound  # nothing valid can go below Clopper–Pearson
        assert bound <= math.log(4 / (3 * alpha)) / samples


def test_the_bound_on_a_mean_uses_a_small_variance():
    values = 0.1 + 0.001 * np.sin(np.arange(2000))
    hoeffding = np.mean(values) + math.sqrt(math.log(20) / 4000)
    assert mean_upper_bound(values, 0.95) < 0.1 + 0.1 * (hoeffding - 0.1)
    assert mean_upper_bound(np.ones(100), 0.95) == 1


def test_integers_give_floats_and_arrays_arrays():
    assert type(theorem2(1, 10)) is float
    assert type(clopper_pearson(1, 10, 0.9)) is float
    n = np.array([[0, 1], [2, 10]])
    for values, function in (
        (theorem2(n, 10), lambda k: theorem2(k, 10)),
        (clopper_pearson(n, 10, 0.9), lambda k: clopper_pearson(k, 10, 0.9)),
    ):
        assert values.shape == (2, 2)
        assert values[1, 0] == function(2)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -0.5, 1.5, 95.0, math.nan])
def test_a_confidence_outside_zero_and_one_is_refused(confidence):
    for call in (
        lambda: clopper_pearson(0, 10, confidence),
        lambda: mean_upper_bound(np.zeros(10), confidence),
    ):
        with pytest.raises(ValueError, match=f"confidence between 0 and 1, got {confidence}"):
            call()


@pytest.mark.parametrize("samples", [0, 1, -3])
def test_fewer_than_two_samples_are_refused(samples):
    for call in (
        lambda: theorem2(0, samples),
        lambda: theorem2_coverage(samples),
        lambda: clopper_pearson(0, samples, 0.95),
        lambda: mean_upper_bound(np.zeros(max(samples, 0)), 0.95),
        lambda: mean_upper_bound(np.zeros(1), 0.95, counts=np.array([max(samples, 0)])),
    ):
        with pytest.raises(ValueError, match="expected at least 2 samples"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theorem2(11, 10), "from 0 to 10 as exceedances, got 11"),
        (lambda: clopper_pearson(-1, 10, 0.9), "got -1"),
        (lambda: theorem2(1.5, 10), "expected integers"),
        (lambda: mean_upper_bound(np.array([0.1, 1.1]), 0.9), "from 0 to 1, got 1.1"),
        (lambda: mean_upper_bound(np.array([0.1, -0.1]), 0.9), "got -0.1 to 0.1"),
        (lambda: mean_upper_bound(np.array([0.1, math.nan]), 0.9), "got nan"),
        (lambda: mean_upper_bound(np.zeros(2), 0.9, counts=np.array([1])), "expected 2 whole numbers"),
        (lambda: mean_upper_bound(np.zeros(2), 0.9, counts=np.array([2, -1])), "whole numbers >= 0"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
