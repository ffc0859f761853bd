"""Theorem 2 (data-driven bound on the false positive rate), and bounds at a stated confidence beside it.

Hypotheses. The detector w and the threshold Δ are fixed before the sample is seen; of m independent natural
inputs, n exceed Δ. `theorem2` and `clopper_pearson` bound p = P(w·φ(x) > Δ), the chance that the next input
exceeds it; `mean_upper_bound` bounds the mean of any [0, 1]-valued variable, of which p is a special case.

No such bound is certain, since any sample may be unlucky. Clopper–Pearson lies below p in at most a fraction
1 − confidence of all samples, whatever the distribution. Theorem 2 names no confidence: `theorem2_coverage`
computes the one it has, and docs/errata.md says what its proof shows.

The threshold may come from the same sample in one case: at its largest response or above, with n = 0, p
exceeds the Clopper–Pearson bound no more often than it should.
"""

from __future__ import annotations

import math
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from stainlock.sphere import FloatArray, as_array, restore

IntArray = NDArray[np.integer[Any]]


@overload
def theorem2(exceedances: int, samples: int) -> float: ...
@overload
def theorem2(exceedances: IntArray, samples: int) -> FloatArray: ...
def theorem2(exceedances: int | IntArray, samples: int) -> float | FloatArray:
    """1 − sup_ε (F − ε)(1 − 2 exp(−2mε²)) with F = 1 − n/m, over the ε that leave both factors positive.

    The paper lets ε be any positive number. But for F < ε < ε₀ = sqrt(log(2)/2m) both factors are negative,
    their product is positive, and the printed bound is below 1 even if every input exceeds Δ. So where F ≤ ε₀
    there is no bound, and 1 is returned.
    """
    n, m = _checked_counts(exceedances, samples), samples
    F = (m - n) / m
    # On (ε₀, F) the logarithm of the objective is strictly concave: the sign of its slope brackets the top.
    low, high = np.full(F.shape, np.sqrt(np.log(2) / (2 * m))), F
    bounded = low < high
    for _ in range(50):
        ε = (low + high) / 2
        η = 2 * np.exp(-2 * m * ε**2)
        rising = 4 * m * ε * η * (F - ε) > 1 - η
        low, high = np.where(rising, ε, low), np.where(rising, high, ε)
    return restore(np.where(bounded, n / m + ε + η * (F - ε), 1.0), exceedances)


@overload
def clopper_pearson(exceedances: int, samples: int, confidence: float) -> float: ...
@overload
def clopper_pearson(exceedances: IntArray, samples: int, confidence: float) -> FloatArray: ...
def clopper_pearson(exceedances: int | IntArray, samples: int, confidence: float) -> float | FloatArray:
    """The p at which n or fewer exceedances among m have probability 1 − confidence; 1 if n = m. One-sided.

    Every larger p is refuted at that confidence. With n = 0 it is 1 − (1 − confidence)^(1/m), 3/m at 95 %.
    """
    n, m = _checked_counts(exceedances, samples), samples
    α = 1 - _checked_confidence(confidence)
    # P(Binomial(m, p) ≤ n) = 1 − I_p(n + 1, m − n); the maximum keeps scipy's argument positive where n = m.
    bound = special.betainccinv(n + 1, np.maximum(m - n, 1), α)
    return restore(np.where(n < m, bound, 1.0), exceedances)


def theorem2_coverage(samples: int) -> float:
    """The confidence of Theorem 2 for m samples: the least probability, over all p, that p ≤ its bound B(n).

    B increases with n, so p > B(n) means n ≤ k for the largest k with B(k) < p, and that is likeliest as p
    falls to B(k). It takes time and memory proportional to m.
    """
    n = np.arange(samples + 1)
    bound = theorem2(n, samples)
    n, bound = n[bound < 1], bound[bound < 1]
    missed = special.betaincc(n + 1, samples - n, bound)
    return 1 - float(np.max(missed, initial=0.0))


def mean_upper_bound(values: FloatArray, confidence: float, *, counts: IntArray | None = None) -> float:
    """An upper bound on the mean of a [0, 1]-valued variable from m independent values X_i, for every m ≥ 2.

    A bet against the mean being μ or more: for 0 ≤ c ≤ 1 the capital K_c(μ) = Π_i (1 − c (X_i − μ)/(1 − μ))
    is never negative, and its expectation is at most 1 if the mean is at least μ. So is that of K, a weighted
    average over c = 1, ½, ¼, ... By Markov's inequality K(mean) ≥ 1/α has probability at most α = 1 −
    confidence; K grows with μ, so the bound is where it reaches 1/α. This is betting in the manner of
    Waudby-Smith and Ramdas, with c averaged instead of adapted, so that the order of the values does not matter.

    c = 1 has ¾ of the weight: it is the best bet when all values are tiny, and then the bound is
    log(4/3α)/m, or 3.3/m at 95 %. Smaller c make use of a small variance, as Bernstein's inequality does.
    """
    x, repeats = checked_sample(values, counts)
    if np.any(x > 1):
        raise ValueError(f"expected values from 0 to 1, got {x.max()}")
    log_target = -math.log1p(-_checked_confidence(confidence))
    m = float(repeats.sum())
    c = 0.5 ** np.arange(3 + math.ceil(math.log2(m) / 2))  # a bet far smaller than 1/√m is never best
    weights = np.where(c == 1, 0.75, 0.25 / (c.size - 1))

    def log_excess(μ: float) -> float:
        with np.errstate(divide="ignore"):  # at c = 1 a value of 1 loses everything
            log_K = [repeats @ np.log1p(-c_j * ((x - μ) / (1 - μ))) for c_j in c]
        return float(special.logsumexp(log_K, b=weights)) - log_target

    # K is at most 1 at the sample's mean, and c = 1 alone reaches the target, if no value is 1, at `alone`.
    with np.errstate(divide="ignore"):
        alone = -math.expm1((repeats @ np.log1p(-x) - log_target + math.log(0.75)) / m)
    low, high = float(repeats @ x) / m, min(alone * (1 + 1e-9), 1 - 1e-12)
    if low >= high or log_excess(high) <= 0:
        return 1.0
    root = float(optimize.brentq(log_excess, low, high, xtol=1e-10 * high))
    return min(root + 1e-9 * high, 1.0)  # rounded up, beyond the tolerance


def checked_sample(values: FloatArray, counts: IntArray | None) -> tuple[FloatArray, FloatArray]:
    """The values that occur and how often; ValueError unless they are finite, >= 0, and two or more."""
    x = as_array(values, "values").reshape(-1)
    repeats = np.ones(x.size) if counts is None else np.asarray(counts, dtype=np.float64).reshape(-1)
    if repeats.shape != x.shape or np.any((repeats < 0) | (repeats % 1 != 0)):
        raise ValueError(f"expected {x.size} whole numbers >= 0 as counts, got {counts}")
    if repeats.sum() < 2:
        raise ValueError(f"expected at least 2 samples, got {int(repeats.sum())}")
    x, repeats = x[repeats > 0], repeats[repeats > 0]
    if np.any((x < 0) | np.isinf(x)):
        raise ValueError(f"expected finite values >= 0, got {x.min()} to {x.max()}")
    return x, repeats


def _checked_counts(exceedances: int | IntArray, samples: int) -> FloatArray:
    n = np.asarray(exceedances)
    if samples < 2:
        raise ValueError(f"expected at least 2 samples, got {samples}")
    if not np.issubdtype(n.dtype, np.integer) or np.any((n < 0) | (n > samples)):
        raise ValueError(f"expected integers from 0 to {samples} as exceedances, got {exceedances}")
    return n.astype(np.float64)


def _checked_confidence(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
    return confidence
