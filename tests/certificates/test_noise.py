"""Exact tail probabilities of noise along one vector, compared with another formula, sampling and certificates."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

from stainlock import SiteError, Target, certify, stain
from stainlock.certificates.noise import NormalNoise, UniformNoise, exact_noise_rate, log_uniform_tail, noise_law
from stainlock.evaluation.generator import noise_data


def volume(w: np.ndarray, t: float) -> float:
    """log P(Σ w_i U_i ≥ t) as the volume of a cut cube, by inclusion and exclusion with sixty digits."""
    with mpmath.workdps(60):
        exact = [mpmath.mpf(float(x)) for x in w]
        total = mpmath.mpf(0)
        for signs in itertools.product((1, -1), repeat=len(w)):
            height = sum(s * x for s, x in zip(signs, exact, strict=True)) - mpmath.mpf(float(t))
            if height > 0:
                total += math.prod(signs) * height ** len(w)
        return float(mpmath.log(total / (mpmath.factorial(len(w)) * mpmath.mpf(2) ** len(w) * mpmath.fprod(exact))))


@pytest.mark.parametrize("dimensions", [1, 2, 4, 5, 7, 10])
@pytest.mark.parametrize("part", [0.0, 0.05, 0.3, 0.6, 0.9, 0.999])
def test_uniform_tails_are_exact(dimensions: int, part: float) -> None:
    w = np.random.default_rng(dimensions).normal(size=dimensions)
    w = np.abs(w) / np.linalg.norm(w)
    t = part * float(w.sum())
    assert log_uniform_tail(w, t) == pytest.approx(volume(w, t), rel=1e-7, abs=1e-7)
    both = math.exp(log_uniform_tail(w, t)) + math.exp(log_uniform_tail(w, -t))
    assert both == pytest.approx(1, abs=1e-9)


def test_uniform_tails_end_where_the_sum_does() -> None:
    w = np.full(20, 1 / math.sqrt(20))
    assert log_uniform_tail(w, float(w.sum())) == -math.inf
    assert log_uniform_tail(w, -float(w.sum())) == 0.0
    assert -math.inf < log_uniform_tail(w, float(w.sum()) - 1e-3) < -100


def test_many_uniforms_are_nearly_normal_and_never_above_the_sub_gaussian_bound() -> None:
    w = torch.full((400,), 1 / 20.0)
    for t in (0.3, 0.9, 1.5):
        exact, normal = UniformNoise().log_tail(w, t), NormalNoise(deviation=1 / math.sqrt(3)).log_tail(w, t)
        assert exact == pytest.approx(normal, rel=0.02)
        assert exact <= -3 * t**2 / 2


@pytest.mark.parametrize("law", [NormalNoise(), NormalNoise(1.0, 0.5), UniformNoise(), UniformNoise(0.0, 3.0)])
@pytest.mark.parametrize("dimensions", [3, 20])
def test_tails_are_what_sampling_gives(law: NormalNoise | UniformNoise, dimensions: int) -> None:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(dimensions, generator=generator, dtype=torch.float64)
    w /= w.norm()
    seen = (law.sample((100_000, dimensions), generator).double() - law.centre) @ w
    for t in (0.0, 0.5 * law.deviation, 2 * law.deviation):
        p = math.exp(law.log_tail(w, t))
        assert abs(float((seen >= t).double().mean()) - p) <= 4 * math.sqrt(p * (1 - p) / len(seen))


def first_layer() -> Target:
    model = nn.Sequential(
        nn.ConvTranspose2d(32, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()
    )
    return Target(model.eval(), (32, 1, 1), (0,), (1,), (-1, 1))


def test_a_stain_that_reads_the_noise_has_an_exact_rate() -> None:
    target = first_layer()
    stained, key = stain(target, site="0", seed=1, steps=20)
    assert exact_noise_rate(stained, key) < 1e-6
    low = replace(key, firing_fraction=0.25)  # a threshold that noise sometimes reaches
    exact = exact_noise_rate(stained, low)
    found = certify(stained, low, noise_data(target, 20_000, seed=3), level="image")
    assert 0.001 < exact < 0.5
    assert abs(found.exceedances / found.samples - exact) <= 4 * math.sqrt(exact / found.samples)
    assert found.bounds["clopper_pearson"] > exact * 0.9


def test_bad_input_is_one_line() -> None:
    target = first_layer()
    with pytest.raises(ValueError, match="'uniform' or 'normal', got 'cauchy'"):
        noise_law(target, "cauchy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 noise vector"):
        noise_data(target, 0)
    stained, key = stain(target, site="0", seed=1, steps=5)
    with pytest.raises(SiteError, match="reads the noise"):
        exact_noise_rate(stained, replace(key, dimension=7))
