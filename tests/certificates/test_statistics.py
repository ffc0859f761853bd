"""Streaming statistics equal what two passes over unfolded windows give, at every kind of site."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from models import UNIT, conv_net, encoder_net, mlp, seeded, transposed_net
from precision import rounding
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock import Site, SiteError, Target, analyse
from stainlock.certificates import Statistics, cap_expectation, cap_upper_bound, mean_upper_bound
from stainlock.network.network import layer_input, respond
from stainlock.numerics import sample_sphere
from stainlock.sphere import cap
from stainlock.target import evaluation_mode


class PadsItself(nn.Conv2d):
    """As in timm's Conv2dSame and TensorFlow: padding depends on the input's size, with more after than before."""

    def forward(self, x: Tensor) -> Tensor:
        short = [max((-(-n // 2) - 1) * 2 + 3 - n, 0) for n in x.shape[-2:]]
        x = F.pad(x, [short[1] // 2, short[1] - short[1] // 2, short[0] // 2, short[0] - short[0] // 2])
        return F.conv2d(x, self.weight, self.bias, stride=self.stride)


class ChannelsLast(nn.Module):
    """A linear layer on (N, H, W, C), as in Swin and ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc, self.head = nn.Conv2d(3, 20, 4, 4), nn.Linear(20, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(self.stem(x).permute(0, 2, 3, 1))).mean((1, 2)))


def pads_itself() -> Target:
    target = conv_net()
    layer = PadsItself(16, 24, 3, stride=2, bias=False)
    layer.weight.data.copy_(target.model.conv.weight.data)
    target.model.conv = layer
    return target


# Each kind of site: the model, the site, and how far apart non-overlapping positions are.
CASES: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "3×3": (conv_net, "conv", (3, 3)),
    "1×1": (lambda: conv_net(kernel_size=1, padding=0), "conv", (1, 1)),
    "strided": (lambda: conv_net(stride=2), "conv", (2, 2)),
    "stride above kernel": (lambda: conv_net(kernel_size=2, stride=3, padding=0), "conv", (1, 1)),
    "dilated": (lambda: conv_net(dilation=2), "conv", (5, 5)),
    "grouped": (lambda: conv_net(groups=4), "conv", (3, 3)),
    "oblong": (lambda: conv_net(kernel_size=(1, 5), padding=(0, 2)), "conv", (1, 5)),
    "same": (lambda: conv_net(kernel_size=4, padding="same"), "conv", (4, 4)),
    "valid": (lambda: conv_net(padding="valid"), "conv", (3, 3)),
    "reflecting": (lambda: conv_net(padding_mode="reflect"), "conv", (3, 3)),
    "dynamic padding": (pads_itself, "conv", (2, 2)),
    "vector": (mlp, "fc", ()),
    "tokens": (encoder_net, "encoder.layers.1.linear1", (1,)),
    "channels last": (lambda: Target(seeded(ChannelsLast), (3, 16, 16), **UNIT), "fc", (1, 1)),
    "transposed": (transposed_net, "deconv", (1, 1)),
    "transposed noise": (transposed_net, "first", (1, 1)),
}
IMAGES, DETECTORS = 9, 3


def in_double(target: Target) -> Target:
    return target.with_model(copy.deepcopy(target.model).double())


def inputs(target: Target, count: int = IMAGES) -> Tensor:
    low, high = target.bounds
    noise = torch.rand(count, *target.input_shape, generator=torch.Generator().manual_seed(3))
    brightness = torch.rand(count, *[1] * len(target.input_shape), generator=torch.Generator().manual_seed(4))
    return low + (high - low) * noise * brightness


def unfolded(target: Target, site: Site, pixels: Tensor, apart: tuple[int, ...], group: int) -> Tensor:
    """φ ``(N, P, d)``, obtained by running the layer with every unit vector as its weights."""
    with evaluation_mode(target.model), torch.no_grad():
        windows = respond(site, target, layer_input(target, site, pixels), torch.eye(site.dimension), group)
    windows = windows[(..., *(slice(None, None, step) for step in apart))]
    return windows.reshape(len(pixels), site.dimension, -1).transpose(1, 2).double()


def prepared(case: str) -> tuple[Target, Site, Tensor, Tensor, list[int]]:
    build, name, _ = CASES[case]
    target = in_double(build())
    site = analyse(target).site(name)
    detectors = sample_sphere(DETECTORS, site.dimension, generator=np.random.default_rng(0))
    return target, site, inputs(target), detectors, [0] * DETECTORS


def streamed(case: str, batch: int, thresholds: Any, *, overlapping: bool = False) -> Statistics:
    target, site, pixels, detectors, groups = prepared(case)
    return Statistics(target, site, detectors, thresholds, groups=groups, overlapping=overlapping).add_all(
        pixels.split(batch)
    )


def natural_thresholds(responses: Tensor) -> np.ndarray:
    return np.unique(np.quantile(np.abs(responses.numpy()), [0.2, 0.6, 0.9, 0.97]))


@pytest.mark.exact
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_two_over_unfolded_windows(case: str, overlapping: bool) -> None:
    target, site, pixels, detectors, _ = prepared(case)
    apart = tuple(1 for _ in CASES[case][2]) if overlapping else CASES[case][2]
    windows = unfolded(target, site, pixels, apart, 0)
    responses = windows @ detectors.T  # (N, P, D)
    thresholds = natural_thresholds(responses)
    found = streamed(case, 4, thresholds, overlapping=overlapping)

    flat = windows.flatten(0, 1)
    assert (found.images, found.positions, found.samples) == (IMAGES, windows.shape[1], len(flat))
    torch.testing.assert_close(found.mean(), flat.mean(0), rtol=1e-9, atol=1e-12)
    moments = found.moments()
    assert moments.mean_norm == pytest.approx(float(flat.mean(0).norm()), rel=1e-9)
    assert moments.trace == pytest.approx(float((flat - flat.mean(0)).square().sum(1).mean()), rel=1e-9)

    norms = np.sort(flat.norm(dim=1).numpy())
    edges = np.repeat(found.norms.norms, found.norms.counts)
    assert np.all(edges >= norms)
    np.testing.assert_allclose(edges, norms, rtol=1e-3)

    exceeding = responses.numpy()[..., None] > thresholds  # (N, P, D, K)
    if not overlapping:
        np.testing.assert_array_equal(found.by_position.each, exceeding.sum((0, 1)))
        np.testing.assert_array_equal(found.by_position.any, exceeding.any(2).sum((0, 1)))
    np.testing.assert_array_equal(found.by_image.each, exceeding.any(1).sum(0))
    np.testing.assert_array_equal(found.by_image.any, exceeding.any((1, 2)).sum(0))
    torch.testing.assert_close(found.maxima, responses.amax((0, 1)), rtol=1e-9, atol=1e-12)

    mean_caps = cap(thresholds / windows.norm(dim=2).numpy()[..., None], site.dimension).mean(1)  # (N, K)
    np.testing.assert_allclose(np.exp(found.caps.log_mean()), mean_caps.mean(0), rtol=0.05)
    assert np.all(np.exp(found.caps.log_mean()) >= mean_caps.mean(0) * (1 - 1e-9))
    by_histogram = cap_expectation(thresholds, found.norms.norms, site.dimension, counts=found.norms.counts)
    np.testing.assert_allclose(np.exp(found.caps.log_mean()), by_histogram, rtol=1e-9)
    union = np.minimum(1, mean_caps * found.positions).mean(0)
    assert np.all(np.exp(found.caps.log_union(found.positions)) >= union * (1 - 1e-9))
    np.testing.assert_allclose(np.exp(found.caps.log_union(found.positions)), union, rtol=0.1)
    upper = found.caps.upper_bound(1, 0.9)
    for k in range(len(thresholds)):
        exact = mean_upper_bound(mean_caps[:, k] * 2, 0.9) / 2
        assert exact * (1 - 1e-6) <= upper[k] <= 1.1 * exact


@pytest.mark.parametrize("case", ["3×3", "dynamic padding", "tokens", "transposed", "grouped"])
@pytest.mark.parametrize("batch", [1, 2, 5, IMAGES])
def test_batches_of_any_size_give_the_same(case: str, batch: int) -> None:
    thresholds = [0.05, 0.1, 0.5]
    whole, split = streamed(case, IMAGES, thresholds), streamed(case, batch, thresholds)
    np.testing.assert_array_equal(split.by_position.each, whole.by_position.each)
    np.testing.assert_array_equal(split.by_image.any, whole.by_image.any)
    np.testing.assert_array_equal(split.norms.counts, whole.norms.counts)
    np.testing.assert_allclose(split.caps.log_mean(), whole.caps.log_mean(), rtol=1e-12)
    np.testing.assert_array_equal(split.caps.upper_bound(1, 0.95), whole.caps.upper_bound(1, 0.95))
    assert split.moments().trace == pytest.approx(whole.moments().trace, rel=1e-9)


def test_tokens_before_images_are_still_the_images_tokens() -> None:
    first, second = (in_double(encoder_net(batch_first=flag)) for flag in (True, False))
    second.model.load_state_dict(first.model.state_dict())
    found = []
    for target in (first, second):
        site = analyse(target).site("encoder.layers.0.linear1")
        detectors = sample_sphere(2, site.dimension, generator=np.random.default_rng(0))
        found.append(Statistics(target, site, detectors, [0.5, 1.0]).add_all(inputs(target).split(4)))
    np.testing.assert_array_equal(found[0].by_image.each, found[1].by_image.each)
    torch.testing.assert_close(found[0].mean(), found[1].mean())


def test_detectors_of_several_groups() -> None:
    """Each detector sees its own group's inputs; the statistics are of the features of a randomly chosen detector."""
    target = in_double(conv_net(groups=4))
    site = analyse(target).site("conv")
    detectors = sample_sphere(3, site.dimension, generator=np.random.default_rng(0))
    groups = [2, 0, 2]
    pixels = inputs(target)
    windows = [unfolded(target, site, pixels, (3, 3), group) for group in groups]
    responses = torch.stack([w @ v for w, v in zip(windows, detectors, strict=True)], 2)
    thresholds = natural_thresholds(responses)
    found = Statistics(target, site, detectors, thresholds, groups=groups).add_all(pixels.split(2))
    np.testing.assert_array_equal(found.by_position.each, (responses.numpy()[..., None] > thresholds).sum((0, 1)))
    flat = torch.cat(windows).flatten(0, 1)
    torch.testing.assert_close(found.mean(), flat.mean(0), rtol=1e-9, atol=1e-12)
    assert found.moments().trace == pytest.approx(float((flat - flat.mean(0)).square().sum(1).mean()), rel=1e-9)


def test_single_and_half_precision_are_near() -> None:
    target = conv_net()
    detectors = sample_sphere(2, 144, generator=np.random.default_rng(0))
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        mine = target.with_model(copy.deepcopy(target.model).to(dtype))
        found = Statistics(mine, analyse(mine).site("conv"), detectors, [0.1]).add_all(inputs(mine).split(4))
        results.append(found.moments())
    assert results[1].trace == pytest.approx(results[0].trace, rel=rounding(target.model))
    assert results[2].trace == pytest.approx(results[0].trace, rel=0.05)


def test_memory_stays_as_it_is() -> None:
    """Memory does not grow with the number of batches, except for caps of new norms, at most one per bin."""
    target, site, pixels, detectors, _ = prepared("3×3")
    found = Statistics(target, site, detectors, [0.1, 0.2])
    found.add(pixels)

    def kept() -> int:
        arrays = (found.caps._counts, found.caps._row_of, found.norms._counts, found.by_position._counts)
        return sum(array.nbytes for array in arrays) + found._total.nbytes

    before, rows = kept(), len(found.caps._rows)
    for _ in range(5):
        found.add(pixels)
    assert kept() == before
    assert len(found.caps._rows) == rows


def test_the_statistics_agree_with_the_pure_bound_where_a_window_is_an_image() -> None:
    target, site, pixels, detectors, _ = prepared("vector")
    found = Statistics(target, site, detectors, [0.2, 0.4]).add_all([pixels])
    norms = unfolded(target, site, pixels, (), 0).norm(dim=2).flatten().numpy()
    bound = cap_upper_bound(np.array([0.2, 0.4]), norms, site.dimension, 0.95)
    np.testing.assert_allclose(found.caps.upper_bound(1, 0.95), bound, rtol=0.05)


def test_wrong_arguments() -> None:
    target, site, pixels, detectors, _ = prepared("3×3")
    with pytest.raises(ValueError, match="expected increasing thresholds"):
        Statistics(target, site, detectors, [1.0, 0.5])
    with pytest.raises(ValueError, match="expected increasing thresholds"):
        Statistics(target, site, detectors, [])
    with pytest.raises(ValueError, match=r"expected detectors \(D, 144\)"):
        Statistics(target, site, detectors[:, :5], [1.0])
    with pytest.raises(ValueError, match="expected a group below 1"):
        Statistics(target, site, detectors, [1.0], groups=[0, 0, 1])
    with pytest.raises(ValueError, match="at least 2 samples, got 0"):
        Statistics(target, site, detectors, [1.0]).moments()
    with pytest.raises(ValueError, match="norms up to"):
        Statistics(target, site, detectors, [1.0]).add(pixels * float("nan"))
    tokens, token_site, _, token_detectors, _ = prepared("tokens")
    with pytest.raises(SiteError, match="images along the first axis"):
        Statistics(tokens, token_site, token_detectors, [1.0]).add_features(torch.rand(7, 16, 32).double(), 3)
