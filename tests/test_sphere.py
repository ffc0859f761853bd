"""The sphere: samples are uniform, caps are exact in every range, and both directions invert each other."""

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from stainlock.numerics import sample_sphere
from stainlock.sphere import cap, inverse_cap, inverse_log_cap, log_cap

DIMENSIONS = st.one_of(st.integers(2, 40), st.integers(2, 10**6))
COSINES = st.floats(0, 1, exclude_max=True)
unhurried = settings(deadline=None, max_examples=40)


def seeded(seed=0):
    return np.random.default_rng(seed)


def reference_log_cap(t, d):
    """High-precision quadrature of the density of w·e: from 0 to t near the middle, else over the tail."""
    with mpmath.workdps(40):
        t, a = mpmath.mpf(t), mpmath.mpf(d - 1) / 2
        log_constant = mpmath.loggamma(a + 0.5) - mpmath.loggamma(a) - mpmath.log(mpmath.pi) / 2
        if t * t * d < 60 and t < 0.9:
            inner = mpmath.quad(lambda s: mpmath.exp((d - 3) * mpmath.log1p(-s * s) / 2), mpmath.linspace(0, t, 5))
            return mpmath.log(0.5 - mpmath.exp(log_constant) * inner)
        log_x = mpmath.log((1 - t) * (1 + t))  # 1 − s² = x exp(−u/a)
        tail = mpmath.quad(lambda u: mpmath.exp(-u) / mpmath.sqrt(-mpmath.expm1(log_x - u / a)), [0, 2, 12, 50, 110])
        return a * log_x + log_constant + mpmath.log(tail / (2 * a))


@pytest.mark.parametrize("dimension", [1, 2, 3, 27, 576])
def test_samples_are_unit_vectors_of_the_promised_kind(dimension):
    vectors = sample_sphere(50, dimension, generator=seeded())
    assert vectors.shape == (50, dimension)
    assert vectors.dtype == torch.float64
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(50, dtype=torch.float64))


@pytest.mark.parametrize("dimension", [2, 3, 27])
def test_samples_are_uniform(dimension):
    vectors = sample_sphere(20_000, dimension, generator=seeded()).numpy()
    direction = np.linspace(-1, 2, dimension)
    cosines = vectors @ (direction / np.linalg.norm(direction))
    assert stats.kstest(cosines, lambda t: 1 - cap(t, dimension)).pvalue > 1e-4
    # E[(w·e)²] = 1/d; its estimate has standard deviation below √(2/N)/d.
    assert np.mean(cosines**2) * dimension == pytest.approx(1, abs=4 * math.sqrt(2 / 20_000))


def test_samples_depend_on_the_generator_alone():
    state = torch.get_rng_state()
    first = sample_sphere(3, 8, generator=seeded(5))
    assert torch.equal(first, sample_sphere(3, 8, generator=seeded(5)))
    assert not torch.equal(first, sample_sphere(3, 8, generator=seeded(6)))
    assert torch.equal(torch.get_rng_state(), state)


@unhurried
@given(t=st.floats(-1, 1))
def test_closed_forms_in_two_and_three_dimensions(t):
    assert cap(t, 2) == pytest.approx(math.acos(t) / math.pi, rel=1e-12, abs=1e-15)
    assert cap(t, 3) == pytest.approx((1 - t) / 2, rel=1e-12)


@pytest.mark.parametrize("dimension", [2, 3, 4, 64, 576, 4608, 10**6])
def test_log_cap_is_accurate_from_the_middle_to_beyond_underflow(dimension):
    tail = [0.4, 3.0, 38.0]  # in standard deviations: central, ordinary, around scipy's underflow
    cosines = [1e-14, 0.3, 0.97, 1 - 1e-9, 1 - 1e-15, *(z / math.sqrt(dimension) for z in tail)]
    for t in (t for t in cosines if t < 1):
        expected = reference_log_cap(t, dimension)
        assert abs(log_cap(t, dimension) / expected - 1) < 1e-12, t
        complement = mpmath.log1p(-mpmath.exp(expected))
        if complement < -1e-300:
            assert abs(log_cap(-t, dimension) / complement - 1) < 1e-12, -t


def test_log_cap_goes_where_probabilities_do_not():
    assert log_cap(0.9, 10**6) < -8e5
    assert cap(0.9, 10**6) == 0.0
    assert cap(0.5, 4608) == pytest.approx(math.exp(log_cap(0.5, 4608)), rel=1e-12)


@unhurried
@given(t=COSINES, dimension=DIMENSIONS)
def test_caps_on_both_sides_add_up_to_one(t, dimension):
    assert cap(t, dimension) + cap(-t, dimension) == pytest.approx(1, abs=1e-15)


@unhurried
@given(pair=st.tuples(COSINES, COSINES).map(sorted), dimension=DIMENSIONS)
def test_caps_shrink_with_the_cosine_and_with_the_dimension(pair, dimension):
    low, high = pair
    slack = 1e-11
    assert log_cap(high, dimension) <= log_cap(low, dimension) * (1 - slack)
    assert log_cap(high, dimension + 1) <= log_cap(high, dimension) * (1 - slack)


@unhurried
@given(t=st.floats(1e-6, 1, exclude_max=True), dimension=DIMENSIONS)
def test_caps_obey_the_bounds_that_theory_promises(t, dimension):
    log_value = log_cap(t, dimension)
    assert log_value <= -dimension * t * t / 2 + 1e-12  # the paper's collision bound
    assert log_value <= -math.log(2 * dimension * t * t) + 1e-12  # Chebyshev, one of two equal sides


@pytest.mark.parametrize("dimension", [2, 3, 50, 10**6])
def test_ends(dimension):
    ends = np.array([-np.inf, -1.5, -1.0, 0.0, 1.0, 1.5, np.inf])
    np.testing.assert_array_equal(cap(ends, dimension), [1, 1, 1, 0.5, 0, 0, 0])
    assert inverse_cap(0.5, dimension) == 0
    assert inverse_cap(0.0, dimension) == 1
    assert inverse_cap(1.0, dimension) == -1


@unhurried
@given(z=st.floats(-9, 9), dimension=st.integers(100, 10**6))
def test_the_inverse_inverts(z, dimension):
    t = z / math.sqrt(dimension)
    # On the side above one half, p near 1 keeps few digits of t; its logarithm keeps them all.
    assert inverse_log_cap(log_cap(t, dimension), dimension) == pytest.approx(t, rel=1e-9, abs=1e-14)
    assert inverse_cap(cap(abs(t), dimension), dimension) == pytest.approx(abs(t), rel=1e-9, abs=1e-14)


@unhurried
@given(log_p=st.floats(-1e5, -1e-3), dimension=st.integers(100, 10**6))
def test_the_inverse_goes_beyond_underflow(log_p, dimension):
    t = inverse_log_cap(log_p, dimension)
    # The nearest double to the true cosine: its neighbours on either side bracket the probability.
    low, high = np.nextafter(t, -2), np.nextafter(t, 2)
    slack = 1e-11 * abs(log_p)
    assert log_cap(float(high), dimension) - slack <= log_p <= log_cap(float(low), dimension) + slack


def test_inverse_in_two_dimensions_is_a_cosine():
    p = np.array([1e-300, 1e-9, 0.01, 0.3, 0.9])
    np.testing.assert_allclose(inverse_cap(p, 2), np.cos(np.pi * p), rtol=1e-12)


def test_floats_give_floats_and_arrays_arrays():
    grid = np.linspace(-1, 1, 6).reshape(2, 3)
    for function in (cap, log_cap):
        assert type(function(0.2, 10)) is float
        values = function(grid, 10)
        assert values.shape == (2, 3)
        assert values[1, 2] == function(float(grid[1, 2]), 10)
    assert type(inverse_cap(0.2, 10)) is float
    assert inverse_cap(np.full((2, 1), 0.2), 10).shape == (2, 1)
    assert cap(np.array([]), 10).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cap(0.5, 1), "dimension of at least 2, got 1"),
        (lambda: log_cap(math.nan, 5), "got nan"),
        (lambda: inverse_cap(1.1, 5), "got 1.1"),
        (lambda: inverse_cap(0.3, 0), "got 0"),
        (lambda: inverse_log_cap(0.1, 5), "at most 0, got 0.1"),
        (lambda: sample_sphere(-1, 3, generator=seeded()), "got -1 and 3"),
        (lambda: sample_sphere(1, 0, generator=seeded()), "got 1 and 0"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
