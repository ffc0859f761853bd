"""Which layers are scattered: those on every path from the image to the output, and no others."""

from __future__ import annotations

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import Target
from stainlock.locks.keyed.cut import cut

LAYERS = ["aside", "a", "b", "last"]


class Net(nn.Module):
    """Four layers that see the image, connected as `ways` says."""

    def __init__(self, ways: str) -> None:
        super().__init__()
        self.ways = ways
        self.aside, self.a, self.b = (nn.Conv2d(3, 4, 3, padding=1) for _ in range(3))
        self.last = nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)  # the output does not depend on it
        if self.ways == "one behind the other":
            return self.last(torch.relu(self.a(x)) * self.b.bias.view(1, -1, 1, 1))  # b is not run
        first = torch.relu(self.a(x))
        if self.ways == "side by side":
            return self.last(first + self.b(x))
        if self.ways == "around one":
            return self.last(first + x.mean(1, keepdim=True))
        return self.last(first) + x.mean()  # a path around all of them


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ("one behind the other", ["a"]),
        ("side by side", ["a", "b"]),
        ("around one", ["a", "last"]),
        ("around all", ["a"]),
    ],
)
def test_the_first_layers_on_every_way(ways: str, expected: list[str]) -> None:
    target = Target(models.seeded(lambda: Net(ways)), (3, 8, 8))
    assert cut(target, LAYERS) == expected


def test_parameters_are_no_ways_and_no_gradients_are_left() -> None:
    target = Target(models.seeded(lambda: Net("side by side")), (3, 8, 8))
    before = models.snapshot(target.model)
    cut(target, LAYERS)
    models.assert_untouched(before, target.model)
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_many_ways_are_followed_up_to_a_limit() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stems = nn.ModuleList(nn.Conv2d(3, 4, 3) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            return sum((stem(x) for stem in self.stems), start=torch.zeros(1))

    names = [f"stems.{i}" for i in range(12)]
    assert cut(Target(Wide(), (3, 8, 8)), names) == names[:8]
