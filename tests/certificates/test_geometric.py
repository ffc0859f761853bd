"""Theorem 1 and its relatives: never below the truth, in the promised order, and what is wrong as printed."""

import contextlib
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special

from stainlock.certificates import (
    cantelli,
    printed_constant,
    sharp_constant,
    theorem1,
    theorem1_printed,
    theorem1_sharp,
)
from stainlock.sphere import cap

VALID = [theorem1, theorem1_sharp, cantelli]
ALL = [*VALID, theorem1_printed]
ERRATA = Path(__file__).parents[2] / "docs" / "errata.md"
unhurried = settings(deadline=None, max_examples=40)


def moments(points, weights):
    """The arguments of a bound, and the norms, for the distribution with these weights on these points."""
    mean = weights @ points
    trace = float(weights @ np.sum((points - mean) ** 2, axis=1))
    known = {"trace": trace, "mean_norm": float(np.linalg.norm(mean)), "dimension": points.shape[1]}
    return known, np.linalg.norm(points, axis=1)


@unhurried
@given(seed=st.integers(0, 2**32), dimension=st.integers(2, 60), reach=st.floats(1e-3, 30))
def test_bounds_hold_and_keep_their_order_on_any_few_points(seed, dimension, reach):
    # For finitely many points the truth is a finite sum of caps: no sampling error in the comparison.
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 7))
    weights = rng.dirichlet(np.full(size, 0.4))
    points = rng.normal(size=(size, dimension)) * rng.lognormal(0, 1.5, size=(size, 1))
    known, norms = moments(points, weights)
    threshold = known["mean_norm"] + reach * math.sqrt(known["trace"] / dimension)
    truth = float(weights @ cap(threshold / np.maximum(norms, 1e-300), dimension)) * (1 - 1e-12)

    assert truth <= theorem1_sharp(threshold, **known) <= theorem1(threshold, **known)
    assert truth <= cantelli(threshold, **known) <= theorem1(threshold, **known)
    # docs/errata.md: for d ≥ 2 the printed inequality is true all the same, as it follows from the sharp one.
    assert theorem1_sharp(threshold, **known) <= theorem1_printed(threshold, **known)
    assert theorem1_printed(threshold, **known) <= theorem1(threshold, **known)


def relu_of_normal(rng, count, d):
    return np.maximum(rng.normal(0.2, 1, (count, d)), 0)


def heavy_tailed(rng, count, d):
    return 1 + rng.standard_t(4, (count, 1)) * rng.normal(size=(count, d))


def mostly_zero(rng, count, d):
    return np.where(rng.random((count, 1)) < 0.02, 5.0, 0.0) * np.ones(d)


@pytest.mark.parametrize("dimension", [2, 3, 16, 128])
@pytest.mark.parametrize("draw", [relu_of_normal, heavy_tailed, mostly_zero])
def test_bounds_hold_against_simulated_detectors_and_inputs(draw, dimension):
    rng = np.random.default_rng(dimension)
    count = 20_000
    features = draw(rng, count, dimension)
    known, _ = moments(features, np.full(count, 1 / count))
    detectors = rng.normal(size=(count, dimension))
    detectors /= np.linalg.norm(detectors, axis=1, keepdims=True)
    responses = np.sum(detectors * features, axis=1)
    for threshold in known["mean_norm"] + np.array([0.5, 1, 2, 4]) * math.sqrt(known["trace"] / dimension):
        rate = np.mean(responses > threshold)
        error = 4 * math.sqrt(rate * (1 - rate) / count)
        for bound in VALID:
            assert rate - error <= bound(float(threshold), **known)


@pytest.mark.parametrize("dimension", [2, 3, 27, 576, 10**6])
def test_the_sharp_constant_is_attained(dimension):
    t = np.linspace(0.5, 1.4, 20_001) / math.sqrt(dimension)
    best = t[np.argmax(t**2 * cap(t, dimension))]
    # x and −x, each with probability ½: mean 0, tr C = ‖x‖² = 1, threshold t.
    known = {"trace": 1.0, "mean_norm": 0.0, "dimension": dimension}
    assert cap(best, dimension) == pytest.approx(theorem1_sharp(float(best), **known), rel=1e-6)


def test_the_sharp_constant_falls_to_that_of_a_normal_response():
    constants = [sharp_constant(d) for d in (1, 2, 3, 10, 100, 10**4, 10**6)]
    assert constants == sorted(constants, reverse=True)
    assert constants[0] == 0.5
    assert constants[2] == pytest.approx(2 / 9)  # d = 3: max of 3t²(1 − t)/2, at t = 2/3
    z = np.linspace(1, 1.4, 100_001)
    assert constants[-1] == pytest.approx(np.max(z**2 * special.ndtr(-z)), rel=1e-5)


@pytest.mark.parametrize(("dimension", "expected"), [(2, 0.424), (27, 0.946), (64, 0.977), (576, 0.997)])
def test_the_printed_constant_is_not_the_second_moment_of_a_uniform_vector(dimension, expected):
    assert printed_constant(dimension) == pytest.approx(expected, abs=5e-4)

    def moment(power, exponent):
        return integrate.quad(lambda θ: np.cos(θ) ** power * np.sin(θ) ** (exponent + 1), 0, np.pi)[0]

    # With t = cos θ, the integral of t² (1 − t²)^(k/2): k = d − 3 on the sphere, d − 2 in the paper's proof.
    density = moment(0, dimension - 3)
    assert dimension * moment(2, dimension - 3) / density == pytest.approx(1)
    assert dimension * moment(2, dimension - 2) / density == pytest.approx(printed_constant(dimension))

    rng = np.random.default_rng(0)
    count = 20_000
    normal = rng.normal(size=count)
    others = rng.chisquare(dimension - 1, count)
    squares = normal**2 / (normal**2 + others)  # (w·e)² for w uniform on the sphere
    error = dimension * np.std(squares) / math.sqrt(count)
    assert abs(dimension * np.mean(squares) - 1) < 4 * error
    if dimension == 2:
        assert dimension * np.mean(squares) > printed_constant(2) + 20 * error


def test_the_printed_theorem_fails_in_one_dimension():
    # φ(x) = ±2 and w = ±1: half of all responses exceed 1, and the printed bound is 0.
    known, _ = moments(np.array([[2.0], [-2.0]]), np.array([0.5, 0.5]))
    assert theorem1_printed(1.0, **known) == 0
    assert all(bound(1.0, **known) >= 0.5 for bound in VALID)


def test_the_two_sided_bound_of_the_printed_proof_fails_in_two_dimensions():
    # The proof bounds P(|w·(φ(x) − μ)| > Δ − w·μ); with x and −x equally likely that is twice the cap.
    known = {"trace": 1.0, "mean_norm": 0.0, "dimension": 2}
    assert 2 * cap(0.8, 2) > 1.2 * theorem1_printed(0.8, **known)
    assert 2 * cap(0.8, 2) <= theorem1(0.8, **known)


@pytest.mark.parametrize("bound", ALL)
@unhurried
@given(
    trace=st.floats(0, 1e6),
    mean_norm=st.floats(0, 1e3),
    dimension=st.integers(1, 10**6),
    scale=st.floats(0.1, 10),
)
def test_bounds_are_probabilities_that_fall_with_the_threshold(bound, trace, mean_norm, dimension, scale):
    thresholds = np.concatenate([[-np.inf], np.linspace(-1, 1e4, 50), [np.inf]])
    values = bound(thresholds, trace=trace, mean_norm=mean_norm, dimension=dimension)
    assert np.all((values >= 0) & (values <= 1))
    assert np.all(np.diff(values) <= 0)
    assert np.all(values[thresholds <= mean_norm] == 1)
    assert values[-1] == 0
    known = {"trace": trace * scale**2, "mean_norm": mean_norm * scale, "dimension": dimension}
    scaled = bound(thresholds * scale, **known)
    clear = np.abs(thresholds - mean_norm) > 1e-6 * max(mean_norm, 1)  # rounding is harmless off the pole
    np.testing.assert_allclose(scaled[clear], values[clear], rtol=1e-6, atol=1e-300)


def test_values_by_hand():
    known = {"trace": 8.0, "mean_norm": 1.0, "dimension": 2}  # tr(C)/d = 4, and Δ − ‖μ‖ = 4 at Δ = 5
    assert theorem1(5.0, **known) == pytest.approx(1 / 4)
    assert cantelli(5.0, **known) == pytest.approx(1 / 5)
    assert theorem1_printed(5.0, **known) == pytest.approx(4 / (3 * math.pi) / 4)
    assert theorem1_sharp(5.0, **known) == pytest.approx(0.262255 / 4, rel=1e-5)


@pytest.mark.parametrize("bound", ALL)
def test_a_perturbation_moves_the_threshold(bound):
    known = {"trace": 4.0, "mean_norm": 1.0, "dimension": 9}
    assert bound(5.0, **known, perturbation=1.5) == bound(3.5, **known)
    assert bound(2.5, **known, perturbation=1.5) == 1
    assert bound(5.0, **known, perturbation=1.5) > bound(5.0, **known)


@pytest.mark.parametrize("bound", VALID)
def test_the_corollary_holds_for_the_worst_perturbation(bound):
    rng = np.random.default_rng(3)
    features = heavy_tailed(rng, 40_000, 8)
    known, norms = moments(features, np.full(40_000, 1 / 40_000))
    delta, threshold = 0.7, known["mean_norm"] + 3.0
    worst = np.mean(cap((threshold - delta) / norms, 8))  # every response raised by δ
    assert worst <= bound(threshold, **known, perturbation=delta)


def test_large_dimensions_and_extreme_sizes_are_stable():
    assert printed_constant(10**6) == pytest.approx(1 - 1.5e-6, abs=1e-11)
    for bound in ALL:
        value = bound(1e160, trace=1.0, mean_norm=0.0, dimension=10**6)
        assert value == 0 or value == pytest.approx(1e-326, rel=1)
        assert bound(1e-160, trace=0.0, mean_norm=0.0, dimension=2) == 0
        assert bound(1e-200, trace=1.0, mean_norm=0.0, dimension=2) == 1


@pytest.mark.parametrize("bound", ALL)
def test_floats_give_floats_and_arrays_arrays(bound):
    known = {"trace": 4.0, "mean_norm": 1.0, "dimension": 9}
    assert type(bound(3.0, **known)) is float
    assert bound(np.full((2, 3), 3.0), **known).shape == (2, 3)
    assert np.all(bound(np.full((2, 3), 3.0), **known) == bound(3.0, **known))


@pytest.mark.parametrize("bound", ALL)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trace": -1.0}, "trace finite and >= 0, got -1"),
        ({"trace": math.nan}, "trace finite and >= 0, got nan"),
        ({"mean_norm": -0.1}, "mean_norm finite and >= 0, got -0.1"),
        ({"perturbation": -2.0}, "perturbation finite and >= 0, got -2"),
        ({"dimension": 0}, "at least 1, got 0"),
        ({"threshold": math.nan}, "threshold, got nan"),
    ],
)
def test_wrong_arguments_are_refused(bound, wrong, message):
    arguments = {"threshold": 3.0, "trace": 4.0, "mean_norm": 1.0, "dimension": 9} | wrong
    with pytest.raises(ValueError, match=message):
        bound(**arguments)


def test_the_snippets_in_the_errata_print_what_they_say():
    text = ERRATA.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 2
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(ERRATA), "exec"), {})
        assert printed.getvalue() == expected
