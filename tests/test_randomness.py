"""One seed, independent streams, and never the global generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stainlock.randomness import Randomness


def draws(randomness: Randomness, purpose: str) -> np.ndarray:
    return randomness.secret(purpose).standard_normal(2000)


def test_streams_repeat_and_differ() -> None:
    assert np.array_equal(draws(Randomness(5), "detector"), draws(Randomness(5), "detector"))
    streams = [
        draws(Randomness(seed), p) for seed in (0, 1, 2**32, 2**64 + 1, 2**127) for p in ("detector", "message", "a")
    ]
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 0.12


def test_streams_do_not_depend_on_the_order_they_are_asked_for() -> None:
    one, other = Randomness(7), Randomness(7)
    first = draws(one, "a"), draws(one, "b")
    second = draws(other, "b"), draws(other, "a")
    assert np.array_equal(first[0], second[1])
    assert np.array_equal(first[1], second[0])


def test_noise_repeats_and_leaves_the_global_generators_alone() -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (torch.rand(50, generator=Randomness(s).noise(p)) for s, p in ((3, "x"), (3, "x"), (3, "y")))
    Randomness().secret("x").random(10)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])  # noqa: NPY002


def test_secret_seeds_have_128_bits() -> None:
    seeds = {Randomness().seed for _ in range(64)}
    assert len(seeds) == 64
    assert 120 < max(seeds).bit_length() <= 128


def test_all_bits_of_a_seed_count() -> None:
    base = draws(Randomness(2**127), "x")
    for bit in (0, 31, 32, 63, 64, 100, 126):
        assert not np.array_equal(base, draws(Randomness(2**127 ^ (1 << bit)), "x"))


def test_wrong_seeds_are_told() -> None:
    with pytest.raises(ValueError, match="expected a seed of 0 or more, got -1"):
        Randomness(-1)
