"""Triggers: strong, 8-bit, within bounds, the same for the same seed, and the same on a crop as on the image."""

from __future__ import annotations

import io
import itertools
from typing import Any

import models
import numpy as np
import pytest
import torch
from PIL import Image
from precision import EXACT, double, rounding
from torch import Tensor, nn

from stainlock import Site, Target, Trigger, analyse
from stainlock.network.network import layer_input, respond
from stainlock.numerics import Randomness, sample_sphere
from stainlock.target import evaluation_mode, synthetic_inputs
from stainlock.trigger import crop_for, find_triggers, natural_responses, seen_region

CASES = {
    "resnet20_cifar10": "layer2.1.conv1",
    "vgg16_cifar10": "features.10",
    "vit_cifar10": "transformer.layers.3.linear1",
    "dcgan_faces32_generator": "generator_deconv.1.0",
    "ddpm_mnist": "downs.0.conv1",
}


def vectors(dimension: int, count: int, seed: int = 0) -> Tensor:
    return sample_sphere(count, dimension, generator=np.random.default_rng(seed))


def search(
    target: Target, site_name: str, count: int = 1, *, seed: int = 0, first: int = 0, **options: Any
) -> list[Trigger]:
    site = analyse(target).site(site_name)
    chosen = vectors(site.dimension, first + count)[first:]
    return find_triggers(target, site, chosen, generator=torch.Generator().manual_seed(seed), **options)


def measured(target: Target, site_name: str, vector: Tensor, trigger: Trigger) -> Tensor:
    """The responses of the whole image at every position."""
    return models.responses(target, analyse(target).site(site_name), vector, trigger.pixels(target))[0]


@pytest.mark.exact
@pytest.mark.parametrize("name", CASES)
@models.analysed_once()
def test_triggers_are_8_bit_within_bounds_and_as_strong_as_they_say(name: str) -> None:
    target = models.real(name)
    site = analyse(target).site(CASES[name])
    position = tuple(n // 2 for n in site.grid)
    triggers = search(target, CASES[name], 3, position=position)
    for vector, trigger in zip(vectors(site.dimension, 3), triggers, strict=True):
        assert trigger.levels.dtype == torch.uint8
        assert trigger.levels.shape == (target.input_shape[0], *trigger.region.size)
        image = trigger.pixels(target)
        low, high = target.bounds
        assert image.shape == (1, *target.input_shape)
        assert low <= float(image.min()) <= float(image.max()) <= high
        found = float(measured(target, CASES[name], vector, trigger)[position])
        assert found == pytest.approx(trigger.response, rel=rounding(target.model))
        natural = natural_responses(target, site, vector[None], synthetic_inputs(target, 8, torch.Generator()))
        assert found > 1.5 * float(natural.max())


def test_a_png_is_the_trigger_bit_for_bit() -> None:
    marked, key = models.stained("resnet20_cifar10", CASES["resnet20_cifar10"])
    trigger = key.detectors[0].trigger
    image = trigger.image(marked)
    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    back = torch.from_numpy(np.array(Image.open(io.BytesIO(file.getvalue())))).permute(2, 0, 1)
    assert torch.equal(back, image)
    with torch.no_grad():
        assert torch.equal(marked.predict(marked.from_bytes(back)[None]), marked.predict(trigger.pixels(marked)))


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (-3.0, 3.0), (0.0, 255.0)])
def test_levels_and_pixels_are_one_to_one(bounds: tuple[float, float]) -> None:
    target = Target(torch.nn.Linear(256, 2), (256,), mean=(0,), std=(1,), bounds=bounds)
    levels = torch.arange(256, dtype=torch.uint8)
    pixels = target.from_bytes(levels)
    assert torch.equal(target.to_bytes(pixels), levels)
    assert float(pixels[0]) == bounds[0]
    assert float(pixels[-1]) == pytest.approx(bounds[1])
    assert float(pixels.max()) <= bounds[1] * (1 + 1e-6)


@pytest.mark.parametrize("name", ["resnet20_cifar10", "vit_cifar10"])
@models.analysed_once()
def test_one_seed_is_one_trigger(name: str) -> None:
    target = models.real(name)
    (first,), (again,), (other,) = (search(target, CASES[name], seed=seed, steps=8) for seed in (3, 3, 4))
    assert torch.equal(first.levels, again.levels)
    assert first.response == again.response
    assert not torch.equal(first.levels, other.levels)


@models.analysed_once()
def test_many_at_once_are_as_strong_as_one_at_a_time() -> None:
    target, site = models.real("resnet20_cifar10"), "layer1.1.conv1"
    together = search(target, site, 16)
    alone = [search(target, site, first=i, seed=i)[0] for i in range(16)]
    means = [sum(t.response for t in triggers) / 16 for triggers in (together, alone)]
    assert means[0] == pytest.approx(means[1], rel=0.04)


@models.analysed_once()
def test_more_restarts_and_steps_are_no_weaker() -> None:
    target = models.real("resnet20_cifar10")

    def mean(**options: Any) -> float:
        return sum(t.response for t in search(target, "layer1.1.conv1", 8, **options)) / 8

    plain = mean()
    assert mean(restarts=4) > plain
    assert mean(steps=120) > plain
    assert mean(steps=5) < plain


@models.analysed_once()
def test_the_search_is_close_to_what_a_long_one_finds() -> None:
    """40 steps are enough: the response is within a quarter of that found with 20 times the work."""
    target = models.real("resnet20_cifar10")
    (short,), (long,) = (
        search(target, CASES["resnet20_cifar10"]),
        search(target, CASES["resnet20_cifar10"], steps=200, restarts=4),
    )
    assert short.response > 0.75 * long.response


@pytest.mark.parametrize("reduction", ["mean", "maximum"])
@pytest.mark.parametrize("name", ["resnet20_cifar10", "vit_cifar10"])
@models.analysed_once()
def test_reductions_are_what_they_say(name: str, reduction: Any) -> None:
    target = models.real(name)
    site = analyse(target).site(CASES[name])
    (trigger,) = search(target, CASES[name], reduction=reduction)
    maps = measured(target, CASES[name], vectors(site.dimension, 1)[0], trigger)
    found = maps.mean() if reduction == "mean" else maps.max()
    assert float(found) == pytest.approx(trigger.response, rel=rounding(target.model))
    assert trigger.levels.shape == target.input_shape
    assert trigger.region.size == target.input_shape[1:]


@pytest.mark.exact
@pytest.mark.parametrize(
    ("name", "site_name"),
    [
        ("resnet20_cifar10", "layer1.0.conv2"), ("resnet20_cifar10", "layer2.0.conv1"), ("vgg16_cifar10", "features.7"),
        ("efficientnet_lite0", "blocks.1.0.conv_pw"),
        pytest.param("efficientnet_lite0", "blocks.2.1.conv_pw", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@models.analysed_once()
def test_a_crop_answers_as_the_whole_image(name: str, site_name: str) -> None:
    target = double(models.real(name))
    site = analyse(target).site(site_name)
    height, width = site.grid
    corners = [(0, 0), (height // 2, width // 2), (height - 1, width - 1), (0, width // 2)]
    for position in corners:
        check_crop(target, site, position)


def check_crop(target: Target, site: Site, position: tuple[int, int]) -> None:
    images = torch.rand(2, *target.input_shape)
    detectors = vectors(site.dimension, 5)
    with evaluation_mode(target.model), torch.no_grad():
        crop = crop_for(target, site, position)
        there = respond(site, target, layer_input(target, site, images), detectors)[:, :, *position]
        here = respond(site, target, layer_input(target, site, crop.region.cut(images)), detectors)
        here = here[:, :, *crop.position]
        # Nothing outside the region that the position sees has any influence.
        region = seen_region(target, site, position)
        noise = region.paste(region.cut(images), torch.rand_like(images))
        pasted = respond(site, target, layer_input(target, site, noise), detectors)[:, :, *position]
    torch.testing.assert_close(here, there, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(pasted, there, rtol=EXACT, atol=EXACT)
    patch, image = (torch.Size(size).numel() for size in (crop.region.size, target.input_shape[1:]))
    assert patch < image, "a crop was to be had"
    (trigger,) = search(target, site.name, position=position, steps=6)
    found = measured(target, site.name, vectors(site.dimension, 1)[0], trigger)[position]
    assert float(found) == pytest.approx(trigger.response, rel=EXACT)


@pytest.mark.parametrize("position", [(16, 0), (0, -1), (3,), (1, 2, 3)])
@models.analysed_once()
def test_positions_out_of_range_are_told(position: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected a position within \(16, 16\) at layer2.1.conv1"):
        search(models.real("resnet20_cifar10"), CASES["resnet20_cifar10"], position=position)


@models.analysed_once()
def test_progress_goes_from_nothing_to_all() -> None:
    seen: list[tuple[int, int]] = []
    search(models.real("resnet20_cifar10"), CASES["resnet20_cifar10"], 3, steps=5, progress=lambda *p: seen.append(p))
    assert seen
    assert seen[-1][0] == seen[-1][1]
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))
    assert len({total for _, total in seen}) == 1


def test_searching_leaves_the_model_and_the_generator_untouched() -> None:
    target = models.trained_mode(models.real("resnet20_cifar10"))
    before = models.snapshot(target.model)
    search(target, CASES["resnet20_cifar10"], 2, steps=3)
    with torch.no_grad():  # also where gradients are switched off
        search(target, CASES["resnet20_cifar10"], 1, steps=3)
    models.assert_untouched(before, target.model)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 17, 23), (100, 1, 1), (192,)])
def test_synthetic_inputs_lie_within_the_bounds(shape: tuple[int, ...]) -> None:
    target = Target(torch.nn.Linear(4, 2), shape, mean=(0,), std=(1,), bounds=(-2, 3))
    found = synthetic_inputs(target, 6, Randomness(1).noise("test"))
    assert found.shape == (6, *shape)
    assert -2 <= float(found.min()) < float(found.max()) <= 3
    assert torch.equal(found, synthetic_inputs(target, 6, Randomness(1).noise("test")))
    assert float(found.flatten(1).std(1).min()) > 0.1


def test_models_that_refuse_channels_last_get_their_own_layout() -> None:
    """A `view` of a map fails on channels last; the trigger is found all the same."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(256, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.second(self.first(x).relu().view(len(x), -1)).relu()
            return hidden

    torch.manual_seed(0)
    target = Target(Viewing(), (3, 8, 8))
    site = analyse(target).site("second")
    vectors = sample_sphere(2, site.dimension, generator=np.random.default_rng(0))
    for trigger in find_triggers(target, site, vectors, generator=torch.Generator()):
        assert trigger.response > 0
