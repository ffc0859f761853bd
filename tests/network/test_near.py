"""Receptive fields with gates held fixed: a crop gives the same as the whole image with these gates."""

from __future__ import annotations

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import Target, analyse, stain, verify
from stainlock.network.network import layer_input
from stainlock.numerics import at
from stainlock.target import evaluation_mode
from stainlock.trigger import crop_for


class Gated(nn.Module):
    """Two convolutions around a squeeze-and-excite block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, stride=2)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.second, self.third = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x * self.excite(self.squeeze(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return self.last(self.third(self.second(x).relu()).relu().mean((2, 3)))


@pytest.fixture
def target() -> Target:
    return Target(models.seeded(Gated), (3, 64, 64), (0.5,), (0.25,))


def test_behind_gates_a_position_sees_little_of_the_image_near_it(target: Target) -> None:
    network = analyse(target)
    assert network.site("first").near is None
    assert network.site("second").field is None
    assert network.site("second").searched == (7, 7)
    assert network.site("third").searched == (11, 11)
    assert network.site("second").patch == (64, 64)
    assert network.site("last").near is None  # its input is pooled over all positions


def test_a_crop_with_an_images_gates_is_the_whole_image(target: Target) -> None:
    site = analyse(target).site("third")
    image = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with evaluation_mode(target.model), torch.no_grad():
        crop = crop_for(target, site, (16, 16))
        assert crop.region.size == (12, 12)
        assert site.near is not None
        features, gates = site.near.open_input(target, image)
        assert torch.allclose(features, layer_input(target, site, image), atol=1e-6)
        held = site.near.layer_input(target, crop.region.cut(image), gates)
        windows = [at(features, (slice(15, 18),) * 2), at(held, tuple(slice(i - 1, i + 2) for i in crop.position))]
        assert torch.allclose(*windows, atol=1e-6)
        alone = layer_input(target, site, crop.region.cut(image))  # with gates computed from the crop itself
        assert not torch.allclose(alone, held, atol=1e-3)


def test_a_trigger_behind_gates_is_a_patch_that_responds_in_the_whole_network(target: Target) -> None:
    marked, key = stain(target, site="third", seed=1)
    trigger = key.detectors[0].trigger
    assert trigger.region.size == (11, 11)
    site = analyse(target).site("third")
    found = models.responses(target, site, key.detectors[0].vector, trigger.pixels(target))[0]
    assert float(at(found, key.position)) == pytest.approx(trigger.response, rel=1e-4)
    assert trigger.response > 2 * key.natural_level
    assert verify(marked, key).stained
    assert not verify(target, key).stained


def test_a_search_that_starts_where_no_gradient_passes_starts_again() -> None:
    """Around mid-grey all channels of the first layer are silent."""

    def build() -> nn.Module:
        first = nn.Conv2d(3, 16, 3, bias=True)
        layers = [first, nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16, 4))

    model = models.seeded(build)
    with torch.no_grad():
        grey = model[0](torch.full((1, 3, 8, 8), 0.5))[0, :, 0, 0]  # type: ignore[index, operator]
        model[0].bias -= grey + 0.3 * model[0].weight.flatten(1).abs().sum(1) * 0.5  # type: ignore[index]
    target = Target(model, (3, 16, 16), (0,), (1,))
    _, key = stain(target, site="2", seed=0)
    assert key.trigger_response > 0
