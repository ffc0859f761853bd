"""Certificates of locks: the distribution their detectors were drawn from is enough for the bounds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import models
import numpy as np
import pytest
import torch

from stainlock import Key, Target, certify, lock
from stainlock.certificates.exact import cap_expectation
from stainlock.certificates.law import Law
from stainlock.evaluation import Tensors
from stainlock.locks.parts.detectors import corner_detectors, seen_from_corner
from stainlock.network.network import analyse


@cache
@models.analysed_once()
def locked(kind: str) -> tuple[Target, Key]:
    """Shared: tests must not change it."""
    base = models.real("resnet20_cifar10")
    return base, lock(base, kind=kind, seed=0, steps=20, restarts=4)[1]


@pytest.mark.parametrize("kind", ["internal", "squeeze-excite"])
@models.analysed_once()
def test_a_locks_false_unlocks_are_certified(kind: str) -> None:
    base, key = locked(kind)
    pixels = models.pixels("resnet20_cifar10", 200)
    certificate = certify(base, key, Tensors(pixels, torch.zeros(len(pixels), dtype=torch.long)), level="image")
    assert certificate.exceedances == 0
    assert 0 < certificate.bounds["cap"] <= certificate.bounds["cantelli"] <= certificate.bounds["theorem1"] <= 1
    assert certificate.bounds["clopper_pearson"] == pytest.approx(1 - 0.05 ** (1 / 200), rel=1e-6)
    assert certificate.dimension == key.details["free_dimension"]


@models.analysed_once()
def test_the_best_of_several_draws_counts_as_all_of_them() -> None:
    base, key = locked("squeeze-excite")
    data = Tensors(models.pixels("resnet20_cifar10", 20), torch.zeros(20, dtype=torch.long))
    single = replace(key, details=key.details | {"restarts": 1})
    ours, theirs = (certify(base, k, data, threshold=4.0).bounds["cap"] for k in (key, single))
    assert ours == pytest.approx(4 * theirs, rel=1e-3)


@models.analysed_once()
def test_keys_of_version_0_1_call_the_number_of_draws_tries() -> None:
    _, key = locked("internal")
    details = {name: value for name, value in key.details.items() if name != "restarts"}
    assert Law.of(replace(key, details=details | {"tries": 4})) == Law.of(key)


@models.analysed_once()
def test_a_corners_detector_exceeds_no_more_than_the_law_says() -> None:
    """Over many draws, on windows of non-negative features, which the detector's veto needs."""
    base = models.real("resnet20_cifar10")
    network = analyse(base)
    site = network.site("layer1.1.conv1")
    generator = np.random.default_rng(0)
    vectors = corner_detectors(network, site, 4000, generator).numpy()
    seen = seen_from_corner(network, site).numpy()
    law = Law(int(seen.sum()), float(np.linalg.norm(vectors[0][seen])))
    windows = np.abs(generator.standard_normal((50, site.dimension)))
    norms = np.linalg.norm(windows, axis=1)
    for share in (0.05, 0.1, 0.2):
        threshold = share * float(norms.mean())
        rate = float((vectors @ windows.T > threshold).mean())
        assert rate <= cap_expectation(threshold / law.size, norms, law.dimension)
    # If only padding is hidden, the law is exact and not only a bound: hidden values are 0, so the veto does nothing.
    padded = windows * seen
    rate = float((vectors @ padded.T > 0.1).mean())
    expected = float(cap_expectation(0.1 / law.size, np.linalg.norm(padded, axis=1), law.dimension))
    assert rate == pytest.approx(expected, rel=0.1)
