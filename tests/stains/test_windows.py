"""Late sites see the whole image, but only a window of it is searched, and the response is measured in the whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import Target, analyse, stain, verify
from stainlock.numerics import at
from stainlock.target import copied
from stainlock.trigger import default_position, find_triggers, window_for, window_size


class Inverted(nn.Module):
    """A block of a MobileNet: only its expansion, a 1×1 convolution, can hold a detector."""

    def __init__(self, width: int, *, gated: bool, reach: int = 1) -> None:
        super().__init__()
        self.expand, self.project = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, width, 1)
        self.deep = nn.Conv2d(2 * width, 2 * width, 3, padding=reach, dilation=reach, groups=2 * width)
        self.gate = nn.Linear(2 * width, 2 * width) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(self.expand(x).relu()).relu()
        if self.gate is not None:
            y = y * self.gate(y.mean((2, 3))).sigmoid()[:, :, None, None]
        return x + self.project(y)


def late(*, gated: bool = False) -> Target:
    """A network whose first layers have few inputs; the others see all of the 96×96 pixels or, if gated, each other."""

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU()]
        layers += [Inverted(24, gated=gated, reach=4) for _ in range(3)]
        layers += [nn.Conv2d(24, 112, 3, 2, 2, 2)] + [Inverted(112, gated=gated) for _ in range(9)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(112, 10))

    return Target(models.seeded(build), (3, 96, 96), (0.5,), (0.25,))


@contextmanager
def counted_work(target: Target) -> Iterator[Callable[[], float]]:
    """How many outputs the convolutions inside compute, forward and backward, as a multiple of one forward pass."""
    outputs = 0

    def count(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal outputs
        outputs += output.numel() * (2 if output.requires_grad and given[0].requires_grad else 1)

    convolutions = [m for m in target.model.modules() if isinstance(m, nn.Conv2d)]
    handles = [m.register_forward_hook(count) for m in convolutions]
    with torch.no_grad():
        target.predict(torch.rand(1, *target.input_shape))
    one, outputs = outputs, 0
    try:
        yield lambda: outputs / one
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("gated", [False, True])
def test_a_default_stain_costs_few_forward_passes_wherever_its_site_is(gated: bool) -> None:
    target = late(gated=gated)
    with counted_work(target) as work:
        stained, key = stain(target, seed=0)
        passes = work()
    trigger = key.detectors[0].trigger
    site = analyse(target).site(key.site)
    assert math.prod(site.searched) > 48 * 48, "the position sees more than the window"
    assert trigger.region.size == (48, 48)
    assert passes < 10
    found = models.responses(target, site, key.detectors[0].vector, trigger.pixels(target))[0]
    assert float(at(found, key.position)) == pytest.approx(trigger.response, rel=1e-4)
    assert trigger.response > 3 * key.natural_level
    assert verify(stained, key).stained
    assert not verify(target, key).stained


def test_little_of_the_response_is_lost_in_a_window() -> None:
    target = late()
    site = analyse(target).site("9.expand")
    vectors = torch.nn.functional.normalize(torch.randn(2, site.dimension, generator=torch.Generator().manual_seed(0)))

    def total(*, window: bool) -> float:
        found = find_triggers(target, site, vectors, generator=torch.Generator().manual_seed(0), window=window)
        return sum(t.response for t in found)

    assert total(window=True) > 0.7 * total(window=False)


def test_a_window_lies_in_the_image_and_holds_its_position() -> None:
    target = late()
    site = analyse(target).site("9.expand")
    assert window_size(target, site) == (48, 48)
    for position in [(0, 0), default_position(site), (site.grid[0] - 1, 0)]:
        window = window_for(target, site, position)
        assert window is not None
        assert all(0 <= start <= 48 for start in window.region.start)
        assert all(0 <= index < site.grid[0] // 2 for index in window.position)


def test_no_window_where_a_position_sees_less_or_the_model_takes_one_size() -> None:
    target = late()
    assert window_size(target, analyse(target).site("2.expand")) is None

    class OneSize(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            torch._assert(x.shape[2] == 96, "images of one size")
            return self.inner(x)

    strict = Target(OneSize(target.model), (3, 96, 96), (0.5,), (0.25,))
    site = analyse(strict).site("inner.9.expand")
    assert window_for(strict, site, default_position(site)) is None
    _, key = stain(strict, seed=0, site="inner.9.expand")
    assert min(key.detectors[0].trigger.region.size) > 48


def test_a_window_in_which_little_of_the_response_is_left_is_not_used() -> None:
    """Here every image is scaled to 96×96 first, so that a window alone is seen enlarged."""

    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(nn.functional.interpolate(x, (96, 96)))

    target = Target(Scaled(late().model), (3, 96, 96), (0.5,), (0.25,))
    site = analyse(target).site("inner.9.expand")
    vector = torch.nn.functional.normalize(torch.randn(1, site.dimension, generator=torch.Generator().manual_seed(0)))
    (trigger,) = find_triggers(target, site, vector, generator=torch.Generator().manual_seed(0), window=True)
    assert trigger.region.size == (96, 96)


def test_a_search_ends_early_if_the_response_is_enough() -> None:
    target = late()
    site = analyse(target).site("2.expand")
    vector = torch.nn.functional.normalize(torch.randn(1, site.dimension, generator=torch.Generator().manual_seed(0)))
    seen: list[tuple[int, int]] = []

    def steps(enough: float) -> int:
        seen.clear()
        find_triggers(
            target, site, vector, generator=torch.Generator().manual_seed(0), enough=enough,
            progress=lambda done, of: seen.append((done, of)),
        )  # fmt: skip
        assert seen[-1][0] == seen[-1][1]
        return len(seen)

    assert steps(math.inf) == 36
    assert 3 <= steps(0.0) < 10


def test_a_copy_is_as_deep_as_copys_own() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
            self.tied.weight = self.first.weight
            self.held = [nn.Linear(2, 2)]
            self.table = {"a": [1, 2], 3: torch.ones(2)}
            self.again = self.table
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.tied(self.first(x))

    model = Odd()
    for own in (copied(model), copy.deepcopy(model)):
        assert isinstance(own, Odd)
        assert own.first.weight is own.tied.weight is not model.first.weight
        assert own.held[0] is not model.held[0]
        assert own.again is own.table is not model.table
        assert own.table["a"] == [1, 2]
        assert own.table["a"] is not model.table["a"]
        assert own.state_dict().keys() == model.state_dict().keys()
        assert all(
            torch.equal(a, b) for a, b in zip(own.state_dict().values(), model.state_dict().values(), strict=True)
        )
    shared = copied(model, [model.first.weight])
    assert isinstance(shared, Odd)
    assert shared.first.weight is shared.tied.weight is model.first.weight
