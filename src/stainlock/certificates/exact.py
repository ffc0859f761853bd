"""Exact probabilities where the paper has bounds: spherical caps, collisions, and a binomial p-value.

Hypotheses. The detector w is uniform on S^{d-1} and independent of the input x. Conclusion: given x, the
response w·φ(x) exceeds Δ with probability cap_d(Δ/‖φ(x)‖), so that over detector and input

    P(w·φ(x) > Δ) = E_x[cap_d(Δ/‖φ(x)‖)],

an equality. It needs only the norms of the features, and for the same distribution of x it is never above a
bound that follows from Theorem 1's hypotheses. Norms may come as a histogram, with `counts`; with the upper
edges of its bins the value for Δ ≥ 0 can only grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import numpy as np
from scipy import special

from stainlock.certificates.data_driven import IntArray, checked_sample, mean_upper_bound
from stainlock.sphere import FloatArray, Real, as_array, log_beta_tail, log_cap, restore

CollisionBound = Literal["cap", "paper"]


def cap_expectation(threshold: Real, norms: FloatArray, dimension: int, *, counts: IntArray | None = None) -> Real:
    """The mean over the sample of cap_d(Δ/‖φ(x)‖): an estimate, without a margin for the sample's size."""
    logs = log_cap_expectation(as_array(threshold, "threshold"), norms, dimension, counts=counts)
    return restore(np.exp(logs), threshold)


def log_cap_expectation(threshold: Real, norms: FloatArray, dimension: int, *, counts: IntArray | None = None) -> Real:
    """log of `cap_expectation`, however small."""
    r, repeats = checked_sample(norms, counts)
    logs = [
        special.logsumexp(log_cap(_cosines(Δ, r), dimension), b=repeats / repeats.sum())
        for Δ in as_array(threshold, "threshold").flat
    ]
    return restore(np.array(logs), threshold)


def cap_upper_bound(
    threshold: Real,
    norms: FloatArray,
    dimension: int,
    confidence: float,
    *,
    counts: IntArray | None = None,
    norm_limit: float = math.inf,
) -> Real:
    """An upper bound on P(w·φ(x) > Δ) at `confidence`, over the independent inputs that gave `norms`."""
    Δ = as_array(threshold, "threshold")
    logs = log_cap_upper_bound(Δ, norms, dimension, confidence, counts=counts, norm_limit=norm_limit)
    return restore(np.exp(logs), threshold)


def log_cap_upper_bound(
    threshold: Real,
    norms: FloatArray,
    dimension: int,
    confidence: float,
    *,
    counts: IntArray | None = None,
    norm_limit: float = math.inf,
) -> Real:
    """log of `cap_upper_bound`. Each threshold has this confidence by itself.

    If no norm can exceed `norm_limit`, no cap exceeds M = cap_d(Δ/norm_limit); without a limit M is ½. The
    bound is M times `mean_upper_bound` of the caps over M. When all caps are tiny that is about M log(1/α)/m,
    so a limit one is sure of (‖φ(x)‖ ≤ 6√d after ReLU6, say) keeps the bound exponentially small.
    """
    r, repeats = checked_sample(norms, counts)
    if np.any(r > norm_limit):
        raise ValueError(f"expected norms up to norm_limit = {norm_limit}, got {r.max()}")
    logs = []
    for Δ in as_array(threshold, "threshold").flat:
        log_M = log_cap(float(Δ / norm_limit), dimension) if Δ >= 0 else 0.0
        if log_M > -math.inf:
            scaled = np.minimum(np.exp(log_cap(_cosines(Δ, r), dimension) - log_M), 1.0)
            log_M += math.log(mean_upper_bound(scaled, confidence, counts=repeats.astype(np.int64)))
        logs.append(log_M)
    return restore(np.array(logs), threshold)


def log_collision_probability(cosine: Real, dimension: int, *, bound: CollisionBound = "cap") -> Real:
    """log P(v·v′ ≥ θ) for two independent detectors: the exact cap, or the paper's bound exp(−dθ²/2)."""
    θ = as_array(cosine, "cosine")
    if np.any((θ < 0) | (θ > 1)):
        raise ValueError(f"expected a cosine from 0 to 1, got {cosine}")
    return restore(log_cap(θ, dimension) if bound == "cap" else -dimension * θ**2 / 2, cosine)


def largest_number_of_clients(
    collision_probability: float, dimension: int, cosine: float, *, bound: CollisionBound = "cap"
) -> float:
    """The most clients N such that some two of their detectors have v·v′ ≥ θ with at most this probability.

    By the union bound over pairs, N(N−1)/2 · P(v·v′ ≥ θ). A whole number, to the precision of a float;
    infinite beyond 1e308, where the logarithm is still finite.
    """
    log_N = log_largest_number_of_clients(collision_probability, dimension, cosine, bound=bound)
    return float(np.floor(np.exp(log_N))) if log_N < math.log(np.finfo(np.float64).max) else math.inf


def log_largest_number_of_clients(
    collision_probability: float, dimension: int, cosine: float, *, bound: CollisionBound = "cap"
) -> float:
    """log of ½ + sqrt(¼ + 2P/q), the real solution N of N(N−1)/2 · q = P, q being the chance of a pair."""
    if not 0 < collision_probability < 1:
        raise ValueError(f"expected a collision probability between 0 and 1, got {collision_probability}")
    log_q = log_collision_probability(cosine, dimension, bound=bound)
    log_ratio = math.log(2 * collision_probability) - log_q
    return float(np.logaddexp(math.log(0.5), np.logaddexp(math.log(0.25), log_ratio) / 2))


@overload
def log_binomial_tail(successes: int, trials: int, rate: float) -> float: ...
@overload
def log_binomial_tail(successes: IntArray, trials: int, rate: float) -> FloatArray: ...
def log_binomial_tail(successes: int | IntArray, trials: int, rate: float) -> float | FloatArray:
    """log P(X ≥ k) for X ~ Binomial(n, p): the p-value of k successes, such as matching bits of a message."""
    k, n, p = np.asarray(successes), trials, rate
    if not np.issubdtype(k.dtype, np.integer) or np.any((k < 0) | (k > n)):
        raise ValueError(f"expected integers from 0 to {n} as successes, got {successes}")
    if not 0 <= p <= 1:
        raise ValueError(f"expected a rate from 0 to 1, got {p}")
    a = np.maximum(k, 1).astype(np.float64).reshape(-1)  # k = 0 is certain, and handled below
    b = n - a + 1
    tail, rest = special.betainc(a, b, p), special.betaincc(a, b, p)  # P(X ≥ k) = I_p(k, n − k + 1)
    with np.errstate(divide="ignore"):
        logs = np.where(tail < 0.5, np.log(tail), np.log1p(-rest))
    far = (tail < 1e-290) & (p > 0)
    if np.any(far):
        logs[far] = log_beta_tail(a[far], b[far], np.log(p), np.log1p(-p))
    return restore(np.where(k.reshape(-1) > 0, logs, 0.0), successes)


def log_poisson_binomial_tail(successes: int, rates: Sequence[float]) -> float:
    """log P(X ≥ k) for X the number of successes in independent trials with a rate each."""
    if not 0 <= successes <= len(rates) or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"expected 0 to {len(rates)} successes and rates from 0 to 1, got {successes} and {rates}")
    log_law = np.full(len(rates) + 1, -np.inf)  # of the number of successes so far
    log_law[0] = 0.0
    with np.errstate(divide="ignore"):
        for rate in rates:
            log_law[1:] = np.logaddexp(log_law[1:] + np.log1p(-rate), log_law[:-1] + np.log(rate))
            log_law[0] += np.log1p(-rate)
    return min(0.0, float(np.logaddexp.reduce(log_law[successes:])))


def _cosines(threshold: float, norms: FloatArray) -> FloatArray:
    """Δ/‖φ‖; a zero vector never exceeds Δ ≥ 0 and always exceeds Δ < 0."""
    cosines = np.full(norms.shape, math.inf if threshold >= 0 else -math.inf)
    np.divide(threshold, norms, out=cosines, where=norms > 0)
    return cosines
