"""The uniform distribution on the unit sphere S^{d-1}: samples, and the measure of spherical caps.

For w uniform on S^{d-1} and any fixed unit vector e, the cosine s = w·e has a density proportional to
(1 − s²)^((d−3)/2). So 1 − s² follows Beta((d−1)/2, ½) and, for t ≥ 0,

    cap_d(t) = P(w·e ≥ t) = ½ I_{1−t²}((d−1)/2, ½),        cap_d(−t) = 1 − cap_d(t).

Everything is float64. Functions return a float for a float, and an array of the same shape for an array.
The logarithmic versions (natural logarithm) still work where probabilities underflow.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from scipy import special

FloatArray = NDArray[np.float64]
Real = TypeVar("Real", float, FloatArray)

_SMALLEST = 1e-290  # below this scipy's incomplete beta function is close to underflow
_NODES, _WEIGHTS = np.polynomial.laguerre.laggauss(48)


def cap(cosine: Real, dimension: int) -> Real:
    """P(w·e ≥ cosine) for w uniform on S^{d-1}, d ≥ 2: 1 for cosines up to −1, 0 from 1 on."""
    return restore(np.exp(log_cap(as_array(cosine, "cosine"), dimension)), cosine)


def log_cap(cosine: Real, dimension: int) -> Real:
    """log P(w·e ≥ cosine) for w uniform on S^{d-1}, d ≥ 2, however small the probability."""
    t = as_array(cosine, "cosine").reshape(-1)
    a = _beta_parameter(dimension)
    s = np.minimum(np.abs(t), 1.0)
    # Whichever of t² and 1 − t² is small must reach scipy unrounded; near 0 betaincc loses digits at d = 2.
    near = s * s * dimension < 1
    doubled = np.piecewise(
        s,
        [near, ~near & (s < 0.7)],
        [
            lambda s: 1 - special.betainc(0.5, a, s * s),
            lambda s: special.betaincc(0.5, a, s * s),
            lambda s: special.betainc(a, 0.5, (1 - s) * (1 + s)),
        ],
    )
    upper = np.log(np.maximum(doubled, _SMALLEST))
    far = (doubled < _SMALLEST) & (s < 1)
    log_x = np.where(s[far] < 0.5, np.log1p(-(s[far] ** 2)), np.log((1 - s[far]) * (1 + s[far])))
    upper[far] = log_beta_tail(a, 0.5, log_x, 2 * np.log(s[far]))
    upper = np.where(s < 1, upper - np.log(2), -np.inf)
    return restore(np.where(t < 0, np.log1p(-np.exp(upper)), upper), cosine)


def inverse_cap(probability: Real, dimension: int) -> Real:
    """The cosine t with cap(t, dimension) = probability."""
    p = as_array(probability, "probability")
    if np.any((p < 0) | (p > 1)):
        raise ValueError(f"expected a probability in [0, 1], got {probability}")
    with np.errstate(divide="ignore"):
        return restore(inverse_log_cap(np.log(p), dimension), probability)


def inverse_log_cap(log_probability: Real, dimension: int) -> Real:
    """The cosine t with log_cap(t, dimension) = log_probability."""
    log_p = as_array(log_probability, "log_probability").reshape(-1)
    if np.any(log_p > 0):
        raise ValueError(f"expected a log-probability of at most 0, got {log_probability}")
    a = _beta_parameter(dimension)
    above_half = log_p > -np.log(2)
    with np.errstate(divide="ignore"):
        log_doubled = np.minimum(np.where(above_half, np.log(-np.expm1(log_p)), log_p) + np.log(2), 0.0)
    t = np.sqrt(special.betainccinv(0.5, a, np.exp(log_doubled)))
    far = (log_doubled < np.log(_SMALLEST)) & (log_doubled > -np.inf)
    # Newton in log x, x = 1 − t²: out here log I_x(a, ½) is almost a straight line of slope a.
    log_x = log_doubled[far] / a
    for _ in range(8):
        log_y = np.log(-np.expm1(log_x))
        log_i = log_beta_tail(a, 0.5, log_x, log_y)
        slope = np.exp(a * log_x - 0.5 * log_y - special.betaln(a, 0.5) - log_i)
        log_x = log_x - (log_i - log_doubled[far]) / slope
    t[far] = np.sqrt(-np.expm1(log_x))
    return restore(np.where(above_half, -t, t), log_probability)


def log_beta_tail(a: float | FloatArray, b: float | FloatArray, log_x: FloatArray, log_y: FloatArray) -> FloatArray:
    """log I_x(a, b), with log_y = log(1 − x), far in the left tail, where I itself underflows.

    With the integration variable x·exp(−u/s) and s = a − (b−1)·x/(1−x), the decay rate of the integrand at x,

        I_x(a, b) = x^a (1−x)^(b−1) / (s B(a, b)) ∫₀^∞ e^{−u} f(u) du,

    f is flat far in the tail, and Gauss–Laguerre quadrature is exact up to rounding.
    """
    odds = np.exp(log_x - log_y)
    s = a - (b - 1) * odds
    u = _NODES[:, None]
    log_f = u * (1 - a / s) + (b - 1) * np.log1p(-np.expm1(-u / s) * odds)
    integral = np.sum(_WEIGHTS[:, None] * np.exp(log_f), axis=0)
    log_i = a * log_x + (b - 1) * log_y - np.log(s) - special.betaln(a, b) + np.log(integral)
    return np.asarray(log_i, dtype=np.float64)


def as_array(value: float | FloatArray, name: str) -> FloatArray:
    array = np.asarray(value, dtype=np.float64)
    if np.any(np.isnan(array)):
        raise ValueError(f"expected numbers as {name}, got nan")
    return array


@overload
def restore(values: FloatArray, like: float) -> float: ...


@overload
def restore(values: FloatArray, like: NDArray[Any]) -> FloatArray: ...


def restore(values: FloatArray, like: float | NDArray[Any]) -> float | FloatArray:
    """A float if ``like`` is a scalar, else an array of its shape."""
    shape = np.shape(like)
    return np.reshape(values, shape) if shape else float(np.reshape(values, ()))


def _beta_parameter(dimension: int) -> float:
    if dimension < 2:
        raise ValueError(f"expected a dimension of at least 2, got {dimension}")
    return (dimension - 1) / 2
