"""Exact tail probabilities of a vector's response to a generator's noise, whose law is known.

A generator's input has independent components of one law. A fixed vector w responds to it with the weighted sum w·z:

    normal   z_i ∼ N(m, s²):    P(w·(z − m) ≥ t) = Φ̄(t / (s‖w‖)),
    uniform  z_i ∼ U(m ± r):    P(w·(z − m) ≥ t) = 1/(2πi) ∫ e^{K(s) − st} ds/s  over Re s = τ > 0,

with K(s) = Σ log(sinh(r w_i s)/(r w_i s)). The integral is taken through the saddle point, where nothing cancels, by
the trapezoidal rule. With step h its error is exactly Σ_{k≠0} e^{2πkτ/h} P(w·(z − m) ≥ t + 2πk/h): terms k > 0 vanish
when 2π/h exceeds the distance from t to the largest possible sum r‖w‖₁, the others are made small by h. Beyond r‖w‖₁
the probability is 0. These are not estimates: no sample is involved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy import optimize, special
from torch import Tensor

from stainlock.errors import SiteError
from stainlock.key import Key
from stainlock.sphere import FloatArray
from stainlock.target import Target

NoiseName = Literal["uniform", "normal"]
_DIGITS = 30.0  # relative accuracy required of the inversion: e to the minus this
_CHUNK, _CHUNKS = 4096, 1024


@dataclass(frozen=True)
class NormalNoise:
    """Independent normal components."""

    centre: float = 0.0
    deviation: float = 1.0

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return (self.centre + self.deviation * torch.randn(shape, generator=generator, dtype=torch.float64)).float()

    def log_tail(self, weights: Tensor, t: float) -> float:
        """log P(w·(z − centre) ≥ t)."""
        return float(special.log_ndtr(-t / (self.deviation * float(weights.double().norm()))))

    def scaled(self, mean: float, std: float) -> NormalNoise:
        return NormalNoise((self.centre - mean) / std, self.deviation / std)


@dataclass(frozen=True)
class UniformNoise:
    """Independent components, uniform between two numbers."""

    low: float = -1.0
    high: float = 1.0

    @property
    def centre(self) -> float:
        return (self.low + self.high) / 2

    @property
    def deviation(self) -> float:
        return (self.high - self.low) / math.sqrt(12)

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        unit = torch.rand(shape, generator=generator, dtype=torch.float64)
        return (self.low + (self.high - self.low) * unit).float()

    def log_tail(self, weights: Tensor, t: float) -> float:
        """log P(w·(z − centre) ≥ t)."""
        return log_uniform_tail((self.high - self.low) / 2 * weights.double().abs().numpy(), t)

    def scaled(self, mean: float, std: float) -> UniformNoise:
        return UniformNoise((self.low - mean) / std, (self.high - mean) / std)


NoiseLaw = NormalNoise | UniformNoise


def noise_law(target: Target, name: NoiseName = "uniform") -> NoiseLaw:
    """The law of a target's noise as the target takes it: uniform within its bounds, or standard normal."""
    if name not in ("uniform", "normal"):
        raise ValueError(f"expected noise 'uniform' or 'normal', got {name!r}")
    return NormalNoise() if name == "normal" else UniformNoise(*target.bounds)


def log_uniform_tail(half_widths: FloatArray, t: float) -> float:
    """log P(Σ w_i U_i ≥ t) for independent U_i uniform on [−1, 1] and w_i ≥ 0."""
    w = np.asarray(half_widths, dtype=np.float64)
    w = w[w > 1e-12 * w.max(initial=0.0)]
    largest = float(w.sum())
    if t >= largest:
        return -math.inf
    if t <= -largest:
        return 0.0
    if t < 0:
        return math.log1p(-math.exp(log_uniform_tail(w, -t)))
    if len(w) <= 4:
        return _few(w, t)
    deviation = float(np.sqrt((w**2).sum() / 3))
    τ = _saddle(w, t, largest, 0.3 / deviation)
    exponent = float(_log_mgf(w, np.array([complex(τ)]))[0].real) - τ * t
    h = 2 * math.pi / max(largest - t, (_DIGITS - exponent) / τ)
    total, magnitude = 0.0, 0.0
    for chunk in range(_CHUNKS):
        y = h * np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK)
        s = τ + 1j * y
        terms = np.exp(_log_mgf(w, s) - s * t - exponent) / s
        terms[0] *= 0.5 if chunk == 0 else 1.0
        total += float(terms.real.sum())
        magnitude = max(magnitude, abs(total))
        if float(np.abs(terms[-16:]).max()) * y[-1] / h < 1e-13 * magnitude:
            break
    return float(exponent + math.log(total * h / math.pi))


def _few(w: FloatArray, t: float) -> float:
    """The volume of a cut cube by inclusion and exclusion over its corners: exact, and few enough not to cancel."""
    n = len(w)
    signs = np.array(np.meshgrid(*[[1.0, -1.0]] * n, indexing="ij")).reshape(n, -1)
    heights = np.maximum(w @ signs - t, 0.0) ** n
    volume = float((signs.prod(0) * heights).sum()) / (math.factorial(n) * 2**n * float(w.prod()))
    return math.log(volume) if volume > 0 else -math.inf


def _log_mgf(w: FloatArray, s: np.ndarray) -> np.ndarray:
    """K(s) for complex s with a positive real part: log sinh x = x + log1p(−e^{−2x}) − log 2."""
    x = np.outer(s, w)
    logs = x + np.log1p(-np.exp(-2 * x)) - np.log(2 * x)
    total: np.ndarray = logs.sum(1)
    return total


def _saddle(w: FloatArray, t: float, largest: float, least: float) -> float:
    """τ with K'(τ) = t: Σ w_i coth(w_i τ) − 1/τ grows from 0 to Σ w_i. Any τ > 0 is valid, small ones are slow."""

    def excess(log_τ: float) -> float:
        τ = math.exp(log_τ)
        return float((w / np.tanh(w * τ) - 1 / τ).sum()) - t

    if excess(math.log(least)) >= 0:
        return least
    return math.exp(optimize.brentq(excess, math.log(least), math.log(4 * len(w) / (largest - t))))


def exact_noise_rate(target: Target, key: Key, noise: NoiseName = "uniform") -> float:
    """P(a noise vector makes some detector fire), exactly, for stains in the layer that reads the noise itself.

    There φ(z) is the noise, and the detectors are fixed vectors, so no data are needed. For several detectors the rates
    are added up, which gives an upper bound. At other layers use `certify` with `evaluation.generator.noise_data`.
    """
    key.check_stain("certify")
    if key.dimension != target.input_shape[0] or target.input_shape[1:] != (1, 1):
        raise SiteError(
            f"{key.site} is not a layer that reads the noise of {target.input_shape} itself: certify on sampled noise"
        )
    law = noise_law(target, noise)
    if len(set(target.mean)) > 1 or len(set(target.std)) > 1:
        raise ValueError("expected one mean and one std for all components of the noise")
    seen = law.scaled(target.mean[0], target.std[0])
    rates = []
    for detector in key.detectors:
        vector = detector.vector.double()
        rates.append(math.exp(seen.log_tail(vector, key.natural_threshold - seen.centre * float(vector.sum()))))
    return min(1.0, sum(rates))
