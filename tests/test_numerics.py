"""One seed, independent streams, and never the global generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from stainlock.numerics import Randomness, Stream
from stainlock.sphere import cap
from stainlock.stains.detector import draw_vector
from stainlock.stains.secrets import draw_classes, draw_mask, message_vector


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


def test_streams_are_what_docs_key_format_specifies_for_ever() -> None:
    """Golden values: keys that were written must verify with every later version."""
    assert Stream(0, "").take(16).hex() == "d61df335d31f29dbf299891f92e0058d"
    assert Stream(2**127 + 5, "detector", 3, 576, b"\x01").take(16).hex() == "defcd683b6d318e094fab8789ad61679"
    assert Stream(7, "test").words(2).tolist() == [5598952715183469393, 17598277384255734835]
    assert Stream(7, "test").uniforms(3).tolist() == [0.3035198348722765, 0.9540045286006293, 0.5538659715289478]
    normals = [0.8152757038823157, -0.24239937053882168, 1.075363362722728, 0.6766574892761333, -0.8746154261589965]
    assert Stream(7, "test").normals(5).tolist() == pytest.approx(normals, rel=1e-13)
    assert Stream(7, "test").signs(12).tolist() == [-1, 1, -1, -1, 1, 1, -1, 1, 1, -1, 1, 1]
    assert Stream(7, "test").permutation(9).tolist() == [3, 0, 2, 5, 8, 7, 4, 1, 6]


def test_stains_secrets_are_what_docs_key_format_specifies_for_ever() -> None:
    first = [0.017730596229776314, 0.6597304348635744, 0.08200804531188192, 0.7233644839805123, 0.1856337337118089]
    second = [0.767061070062394, -0.5035733822615586, 0.27742239594744483, -0.18784107969005923, 0.2139712748946487]
    added = [0.18253800634246287, 0.4860278897275586, -0.813326627032615, 0.2532767422578886, 0.0693358221879246]
    row = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    assert draw_vector(2026, 0, 5).tolist() == pytest.approx(first, rel=1e-12)
    assert draw_vector(2026, 1, 5).tolist() == pytest.approx(second, rel=1e-12)
    assert draw_vector(2026, 0, 5, row).tolist() == pytest.approx(added, rel=1e-12)
    assert torch.equal(draw_vector(2026, 0, 5, row), draw_vector(2026, 0, 5, row.half()))
    mask = draw_mask(2026, 10)
    assert mask.order.tolist() == [7, 0, 9, 2, 3, 1, 4, 6, 5, 8]
    assert mask.flips.tolist() == [1, -1, -1, 1, 1, 1, 1, 1, -1, 1]
    assert [draw_classes(2026, i, 1000)[0] for i in range(5)] == [787, 40, 312, 454, 871]
    assert draw_classes(2026, 0, 90, 9) == [14, 9, 77, 34, 3, 38, 29, 30, 5]


def test_a_stream_is_bound_to_the_whole_of_everything_it_is_for() -> None:
    streams = [
        Stream(1, "detector", 2, 3, b""), Stream(12, "detector", 2, 3, b""), Stream(1, "detectors", 2, 3, b""),
        Stream(1, "d", 2, 3, b""), Stream(1, "detector", 23, b""), Stream(1, "detector", 2, 3),
        Stream(1, "detector", 3, 2, b""),
        Stream(1, "detector2", 3, b""), Stream(1, "detector", 2, 3, b"", b""), Stream(1, "detector", 2, 3, b"\0"),
    ]  # fmt: skip
    assert len({stream.take(32) for stream in streams}) == len(streams)


def test_purposes_count_to_their_last_letter() -> None:
    randomness = Randomness(3)
    purposes = ("disguise a", "disguise b", "disguise", "d", "detector")
    assert len({randomness.secret(purpose).bytes(16) for purpose in purposes}) == len(purposes)
    noise = {float(torch.rand(1, generator=randomness.noise(purpose), dtype=torch.float64)) for purpose in purposes}
    assert len(noise) == len(purposes)


def test_a_stream_goes_on_where_it_was() -> None:
    stream, whole = Stream(5, "x"), Stream(5, "x").take(40)
    assert stream.take(3) + stream.take(0) + stream.take(37) == whole


def test_streams_are_uniform_normal_and_fair() -> None:
    assert stats.kstest(Stream(1, "u").uniforms(20_000), "uniform").pvalue > 1e-4
    assert stats.kstest(Stream(1, "n").normals(20_001), "norm").pvalue > 1e-4
    assert abs(Stream(1, "s").signs(40_000).mean()) < 4 / 200
    places = np.array([draw_classes(seed, 0, 5)[0] for seed in range(5000)])
    assert stats.chisquare(np.bincount(places, minlength=5)).pvalue > 1e-4
    vectors = torch.stack([draw_vector(seed, 0, 7) for seed in range(5000)])
    assert stats.kstest(vectors @ torch.eye(7, dtype=torch.float64)[2], lambda t: 1 - cap(t, 7)).pvalue > 1e-4
    signed = torch.stack([message_vector("m", seed, 72) for seed in range(2000)])
    assert stats.kstest(signed[:, 5], lambda t: 1 - cap(t, 72)).pvalue > 1e-4
