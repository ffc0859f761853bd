"""Spherical caps averaged over inputs, collisions between detectors, and the binomial p-value."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stainlock.certificates import (
    cantelli,
    cap_expectation,
    cap_upper_bound,
    largest_number_of_clients,
    log_binomial_tail,
    log_cap_expectation,
    log_cap_upper_bound,
    log_collision_probability,
    log_largest_number_of_clients,
    theorem1,
    theorem1_sharp,
)
from stainlock.sphere import cap, log_cap

unhurried = settings(deadline=None, max_examples=40)


def unit_vectors(rng, count, dimension):
    vectors = rng.normal(size=(count, dimension))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def features(rng, count, dimension):
    """Like a layer's inputs: not negative, not centred, sparse, of very different lengths."""
    return np.maximum(rng.normal(0.1, 1, (count, dimension)), 0) * rng.lognormal(0, 0.7, (count, 1))


@pytest.mark.parametrize("dimension", [2, 3, 9, 64])
def test_the_expectation_is_the_false_positive_rate(dimension):
    rng = np.random.default_rng(dimension)
    count = 20_000
    phi = features(rng, count, dimension)
    norms = np.linalg.norm(phi, axis=1)
    responses = np.sum(unit_vectors(rng, count, dimension) * phi, axis=1)
    thresholds = np.array([-1.0, 0.0, 0.3, 1.0, 3.0])
    for threshold, rate in zip(thresholds, cap_expectation(thresholds, norms, dimension), strict=True):
        error = 4 * math.sqrt(rate * (1 - rate) / count)
        assert abs(np.mean(responses > threshold) - rate) <= error


@unhurried
@given(seed=st.integers(0, 2**32), dimension=st.integers(2, 300), reach=st.floats(0.01, 20))
def test_the_expectation_is_never_above_what_follows_from_the_moments(seed, dimension, reach):
    phi = features(np.random.default_rng(seed), 30, dimension)
    mean = np.mean(phi, axis=0)
    known = {
        "trace": float(np.mean(np.sum((phi - mean) ** 2, axis=1))),
        "mean_norm": float(np.linalg.norm(mean)),
        "dimension": dimension,
    }
    threshold = known["mean_norm"] + reach * math.sqrt(known["trace"] / dimension)
    rate = cap_expectation(threshold, np.linalg.norm(phi, axis=1), dimension)
    for bound in (theorem1, theorem1_sharp, cantelli):
        assert rate <= bound(threshold, **known) * (1 + 1e-12)


def test_the_expectation_falls_exponentially_where_the_moments_fall_quadratically():
    norms = np.full(10, 1.0)
    rate = cap_expectation(0.5, norms, 576)
    assert rate < 1e-37
    assert theorem1(0.5, trace=1.0, mean_norm=0.0, dimension=576) > 1e-3
    assert log_cap_expectation(0.5, norms, 576) == pytest.approx(log_cap(0.5, 576))


def test_logarithms_go_beyond_underflow():
    norms = np.array([1.0, 2.0])
    assert cap_expectation(1.8, norms, 10**6) == 0
    assert log_cap_expectation(1.8, norms, 10**6) == pytest.approx(log_cap(0.9, 10**6) - math.log(2))


def test_a_histogram_stands_for_its_sample_and_upper_edges_only_add():
    rng = np.random.default_rng(0)
    norms = np.round(rng.lognormal(0, 0.4, 3000), 2)
    distinct, counts = np.unique(norms, return_counts=True)
    thresholds = np.array([0.0, 0.5, 2.0])
    for function in (cap_expectation, lambda *a, **k: cap_upper_bound(*a, 0.9, **k)):
        whole = function(thresholds, norms, 20)
        np.testing.assert_allclose(function(thresholds, distinct, 20, counts=counts), whole, rtol=1e-6)
    counts, edges = np.histogram(norms, bins=50)
    binned = cap_expectation(thresholds, edges[1:], 20, counts=counts)
    assert np.all(binned >= cap_expectation(thresholds, norms, 20) * (1 - 1e-12))


def test_zero_features_respond_with_zero():
    norms = np.array([0.0, 0.0])
    np.testing.assert_array_equal(cap_expectation(np.array([-1.0, 0.0, 1.0]), norms, 5), [1, 0, 0])


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("samples", [2, 100])
def test_the_upper_bound_covers(samples, limited):
    # ‖φ‖ uniform on [0, 1]: the true rate is an integral, here over a fine grid.
    dimension, threshold, confidence, runs = 8, 0.45, 0.8, 150
    truth = np.mean(cap(threshold / ((np.arange(20_000) + 0.5) / 20_000), dimension))
    rng = np.random.default_rng(samples)
    limit = {"norm_limit": 1.0} if limited else {}
    bounds = np.array(
        [cap_upper_bound(threshold, rng.random(samples), dimension, confidence, **limit) for _ in range(runs)]
    )
    assert np.mean(bounds < truth) <= (1 - confidence) + 4 * math.sqrt(0.16 / runs)
    assert np.all(bounds <= (cap(threshold, dimension) if limited else 0.5))


@unhurried
@given(seed=st.integers(0, 2**32), dimension=st.integers(2, 1000), threshold=st.floats(-1, 5))
def test_the_upper_bound_is_above_the_estimate(seed, dimension, threshold):
    norms = np.random.default_rng(seed).lognormal(0, 0.5, 25)
    estimate = cap_expectation(threshold, norms, dimension)
    bound = cap_upper_bound(threshold, norms, dimension, 0.9)
    assert estimate * (1 - 1e-12) <= bound <= 1
    assert bound <= 0.5 or threshold < 0 or bound == pytest.approx(0.5)


def test_a_limit_on_the_norms_keeps_the_upper_bound_exponentially_small():
    norms = np.random.default_rng(0).uniform(5, 6, 2000)
    free = cap_upper_bound(9.0, norms, 576, 0.95)
    assert free == pytest.approx(0.5 * math.log(4 / 0.15) / 2000, rel=0.01)
    assert cap_upper_bound(9.0, norms, 576, 0.95, norm_limit=12.0) < 1e-100
    log_bound = log_cap_upper_bound(9.0, norms, 10**6, 0.95, norm_limit=12.0)
    assert log_cap_expectation(9.0, norms, 10**6) < log_bound < log_cap(0.75, 10**6)
    assert log_cap_upper_bound(9.0, norms, 576, 0.95, norm_limit=8.0) == -math.inf


@unhurried
@given(cosine=st.floats(0, 1), dimension=st.integers(2, 10**6))
def test_the_exact_collision_probability_is_below_the_papers_bound(cosine, dimension):
    exact = log_collision_probability(cosine, dimension)
    assert exact <= log_collision_probability(cosine, dimension, bound="paper") + 1e-12
    clients = largest_number_of_clients(1e-3, dimension, cosine)
    assert clients >= largest_number_of_clients(1e-3, dimension, cosine, bound="paper")


@pytest.mark.parametrize("bound", ["cap", "paper"])
@pytest.mark.parametrize(("dimension", "cosine"), [(2, 0.9), (10, 0.8), (64, 0.5), (64, 0.05)])
@pytest.mark.parametrize("probability", [1e-6, 0.01, 0.7])
def test_the_number_of_clients_is_the_largest_allowed(dimension, cosine, probability, bound):
    pair = math.exp(log_collision_probability(cosine, dimension, bound=bound))
    clients = largest_number_of_clients(probability, dimension, cosine, bound=bound)
    assert clients == int(clients) >= 1
    assert clients * (clients - 1) / 2 * pair <= probability * (1 + 1e-12)
    assert (clients + 1) * clients / 2 * pair > probability * (1 - 1e-12)


def test_so_many_clients_collide_no_more_often_than_promised():
    dimension, cosine, promised, runs = 12, 0.8, 0.3, 400
    clients = int(largest_number_of_clients(promised, dimension, cosine))
    assert clients > 5
    rng = np.random.default_rng(0)
    collided = 0
    for _ in range(runs):
        v = unit_vectors(rng, clients, dimension)
        collided += np.max(v @ v.T - 2 * np.eye(clients)) >= cosine
    assert collided / runs <= promised + 4 * math.sqrt(0.25 / runs)


def test_clients_beyond_the_range_of_floats():
    assert largest_number_of_clients(1e-6, 10**6, 0.5) == math.inf
    log_n = log_largest_number_of_clients(1e-6, 10**6, 0.5)
    assert log_n == pytest.approx((math.log(2e-6) - log_cap(0.5, 10**6)) / 2)
    assert largest_number_of_clients(0.5, 5, 1.0) == math.inf
    assert largest_number_of_clients(0.5, 5, 0.0) == 2  # one pair, whose chance is one half


def log_of(fraction):
    """log of a positive Fraction of any size."""
    shift = fraction.numerator.bit_length() - fraction.denominator.bit_length()
    return math.log(float(fraction / Fraction(2) ** shift)) + shift * math.log(2)


def exact_tail(k, n, p):
    return sum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k, n + 1))


@unhurried
@given(
    counts=st.integers(1, 120).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    rate=st.sampled_from([0.5, 0.25, 2.0**-10, 0.875, 2.0**-40]),
)
def test_the_binomial_tail_against_whole_numbers(counts, rate):
    k, n = counts
    tail = exact_tail(k, n, Fraction(rate))
    expected = math.log1p(-float(1 - tail)) if tail > Fraction(1, 2) else log_of(tail)
    assert log_binomial_tail(k, n, rate) == pytest.approx(expected, rel=1e-9, abs=1e-320)


@pytest.mark.parametrize(("k", "n", "rate"), [(1990, 2000, 0.5), (1200, 1500, 2.0**-4), (1500, 1500, 2.0**-200)])
def test_the_binomial_tail_beyond_underflow(k, n, rate):
    expected = log_of(exact_tail(k, n, Fraction(rate)))
    assert expected < -750
    assert log_binomial_tail(k, n, rate) == pytest.approx(expected, rel=1e-12)


def test_the_binomial_tail_at_its_ends_and_in_arrays():
    k = np.array([0, 1, 5])
    np.testing.assert_array_equal(log_binomial_tail(k, 5, 0.0), [0, -np.inf, -np.inf])
    np.testing.assert_array_equal(log_binomial_tail(k, 5, 1.0), [0, 0, 0])
    assert log_binomial_tail(5, 5, 0.5) == pytest.approx(5 * math.log(0.5))
    assert type(log_binomial_tail(3, 5, 0.5)) is float
    tails = log_binomial_tail(np.arange(501), 500, 0.3)
    assert np.all(np.diff(tails) < 0)


def test_floats_give_floats_and_arrays_arrays():
    norms = np.array([1.0, 2.0, 3.0])
    grid = np.array([[0.5, 1.0], [1.5, 4.0]])
    for function in (
        lambda threshold: cap_expectation(threshold, norms, 4),
        lambda threshold: cap_upper_bound(threshold, norms, 4, 0.9),
    ):
        assert type(function(1.0)) is float
        assert function(grid).shape == (2, 2)
        assert function(grid)[0, 1] == function(1.0)


NORMS = np.array([1.0, 2.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cap_expectation(1.0, np.array([1.0]), 5), "at least 2 samples, got 1"),
        (lambda: cap_upper_bound(1.0, np.array([]), 5, 0.9), "at least 2 samples, got 0"),
        (lambda: cap_upper_bound(1.0, NORMS, 5, 1.0), "confidence between 0 and 1, got 1.0"),
        (lambda: cap_upper_bound(1.0, NORMS, 5, 0.9, norm_limit=1.5), "norm_limit = 1.5, got 2.0"),
        (lambda: cap_expectation(1.0, np.array([1.0, -1.0]), 5), "got -1.0 to 1.0"),
        (lambda: cap_expectation(1.0, np.array([1.0, np.inf]), 5), "got 1.0 to inf"),
        (lambda: cap_expectation(math.nan, NORMS, 5), "threshold, got nan"),
        (lambda: cap_expectation(1.0, NORMS, 1), "at least 2, got 1"),
        (lambda: log_collision_probability(-0.1, 5), "from 0 to 1, got -0.1"),
        (lambda: largest_number_of_clients(0.0, 5, 0.5), "between 0 and 1, got 0.0"),
        (lambda: largest_number_of_clients(1.0, 5, 0.5), "between 0 and 1, got 1.0"),
        (lambda: log_binomial_tail(6, 5, 0.5), "from 0 to 5 as successes, got 6"),
        (lambda: log_binomial_tail(1, 5, 1.5), "from 0 to 1, got 1.5"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
