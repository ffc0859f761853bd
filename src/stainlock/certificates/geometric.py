"""Theorem 1 (geometric bound on the false positive rate), corrected, as printed, and made tighter.

Hypotheses. The detector w is uniform on S^{d-1}; the features φ(x) of an independent natural input x have
mean μ and covariance C; the threshold Δ exceeds ‖μ‖. Conclusion of each function, with its own bound: over
the joint choice of detector and input,

    P(w·φ(x) > Δ) ≤ bound.

Only tr C, ‖μ‖ and d enter. The argument: w·φ(x) > Δ means w·(φ(x) − μ) > A, where A = Δ − w·μ ≥ Δ − ‖μ‖;
since E[(w·e)²] = 1/d for every unit vector e, the left side has mean 0 and, over w and x, variance tr(C)/d.

Corollary (weight perturbations). If the response ŵ·φ̂(x) of the perturbed model is within δ of w·φ(x) with
probability one, then ŵ·φ̂(x) > Δ implies w·φ(x) > Δ − δ, and each bound holds with Δ − δ in place of Δ: pass δ
as `perturbation`. Like the theorem, this is over the choice of w too, not for one fixed detector.

Where Δ ≤ ‖μ‖ + δ the theorem says nothing, and the bound is 1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from stainlock.sphere import FloatArray, Real, as_array, log_cap, restore


def theorem1(threshold: Real, *, trace: float, mean_norm: float, dimension: int, perturbation: float = 0.0) -> Real:
    """tr(C) / (d (Δ − ‖μ‖)²): Theorem 1 with its constant corrected to E[(w·e)²] = 1/d. By Chebyshev."""
    squared = _chebyshev(threshold, trace, mean_norm, dimension, perturbation)
    return restore(np.minimum(squared, 1.0), threshold)


def theorem1_printed(
    threshold: Real, *, trace: float, mean_norm: float, dimension: int, perturbation: float = 0.0
) -> Real:
    """Theorem 1 with the constant the paper prints, for comparison: `printed_constant`, docs/errata.md."""
    squared = _chebyshev(threshold, trace, mean_norm, dimension, perturbation)
    with np.errstate(invalid="ignore"):  # 0 · ∞ at d = 1, where there is no bound
        printed = np.where(np.isinf(squared), 1.0, printed_constant(dimension) * squared)
    return restore(np.minimum(printed, 1.0), threshold)


def theorem1_sharp(
    threshold: Real, *, trace: float, mean_norm: float, dimension: int, perturbation: float = 0.0
) -> Real:
    """κ_d tr(C) / (d (Δ − ‖μ‖)²) with κ_d = max_t d t² cap_d(t): 0.2623 at d = 2, falling to 0.1657.

    For a given x with r = ‖φ(x)‖ > Δ the probability is cap_d(Δ/r) ≤ (κ_d/d) (r/Δ)², by the choice of κ_d.
    And r/Δ ≤ (r − ‖μ‖)/(Δ − ‖μ‖) ≤ ‖φ(x) − μ‖/(Δ − ‖μ‖); if r ≤ Δ, the probability is 0. Now take the mean
    over x. No smaller constant will do: with μ = 0 and all norms at the maximising Δ/r, there is equality.
    """
    squared = _chebyshev(threshold, trace, mean_norm, dimension, perturbation)
    return restore(np.minimum(sharp_constant(dimension) * squared, 1.0), threshold)


def cantelli(threshold: Real, *, trace: float, mean_norm: float, dimension: int, perturbation: float = 0.0) -> Real:
    """q / (q + (Δ − ‖μ‖)²) with q = tr(C)/d: one-sided, never above Theorem 1.

    Cantelli's inequality for a fixed w bounds by s²/(s² + A²), s² = w·Cw; this is concave in s², so Jensen's
    inequality replaces s² by its mean tr(C)/d.
    """
    gap = _gap(threshold, trace, mean_norm, dimension, perturbation)
    spread = np.sqrt(trace / dimension)
    with np.errstate(invalid="ignore"):  # 0/0, where there is no bound either
        bound = (spread / np.hypot(spread, np.maximum(gap, 0.0))) ** 2
    return restore(np.where(gap > 0, bound, 1.0), threshold)


def printed_constant(dimension: int) -> float:
    """d times what the paper's proof gives for E[(w·e)²]: below 1, so the proof does not hold as it stands.

    It integrates t² against (1 − t²)^((d−2)/2); the density of w·e on S^{d-1} has the exponent (d−3)/2.
    """
    _check_dimension(dimension)
    ratio = special.poch(dimension / 2, 0.5)  # Γ((d+1)/2) / Γ(d/2)
    return float(dimension * (dimension - 1) / (dimension + 1) / (2 * ratio**2))


@lru_cache(maxsize=1024)
def sharp_constant(dimension: int) -> float:
    """κ_d = max_t d t² cap_d(t), the best constant c in P(w·φ(x) > Δ) ≤ c tr(C) / (d (Δ − ‖μ‖)²)."""
    if dimension == 1:  # w = ±1: cap is ½ up to t = 1
        return 0.5
    _check_dimension(dimension)

    def negative_log(z: float) -> float:  # z = t √d; unimodal, since log t and log cap are both concave
        return -2 * math.log(z) - log_cap(z / math.sqrt(dimension), dimension)

    best = optimize.minimize_scalar(negative_log, bounds=(0.5, 1.4), options={"xatol": 1e-9})
    return math.exp(-best.fun)


def _chebyshev(
    threshold: float | FloatArray, trace: float, mean_norm: float, dimension: int, perturbation: float
) -> FloatArray:
    """tr(C) / (d gap²), infinite where gap ≤ 0."""
    gap = _gap(threshold, trace, mean_norm, dimension, perturbation)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(gap > 0, (np.sqrt(trace / dimension) / gap) ** 2, np.inf)


def _gap(
    threshold: float | FloatArray, trace: float, mean_norm: float, dimension: int, perturbation: float
) -> FloatArray:
    """Δ − ‖μ‖ − δ, once the arguments have been checked."""
    _check_dimension(dimension)
    for name, value in (("trace", trace), ("mean_norm", mean_norm), ("perturbation", perturbation)):
        if not 0 <= value < np.inf:
            raise ValueError(f"expected {name} finite and >= 0, got {value}")
    return np.asarray(as_array(threshold, "threshold") - mean_norm - perturbation)


def _check_dimension(dimension: int) -> None:
    if dimension < 1:
        raise ValueError(f"expected a dimension of at least 1, got {dimension}")
