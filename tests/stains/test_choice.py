"""The default site is one at which the trigger search is quick."""

from __future__ import annotations

import math

import models
from torch import nn

from stainlock import Target, analyse, stain
from stainlock.stains.choice import affordable_steps, choose_site, step_costs
from stainlock.trigger import STEPS


def deep(width: int, blocks: int, size: int = 64) -> Target:
    """Convolutions one behind another, the first with too few inputs to be chosen."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(blocks):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return Target(models.seeded(lambda: nn.Sequential(*layers, *head)), (3, size, size))


def test_steps_cost_more_the_deeper_the_site_and_all_of_it_at_the_most() -> None:
    network = analyse(deep(32, 6))
    costs = step_costs(network)
    convolutions = [s for s in network.sites.values() if s.kind == "convolution"]
    found = [costs[s.name] for s in convolutions]
    assert found == sorted(found)
    assert found[0] == 0
    assert 0 < found[1] < found[-1] < 3


def test_a_cheap_site_gets_all_steps_and_an_expensive_one_fewer() -> None:
    network = analyse(deep(64, 6))
    costs = step_costs(network)
    assert costs[choose_site(network, additive=False).name] <= 0.22
    assert affordable_steps(network, network.site("2")) == STEPS
    last = max(network.sites.values(), key=lambda s: costs[s.name] if s.kind == "convolution" else -1)
    fewer = affordable_steps(network, last)
    assert fewer < STEPS
    assert fewer == max(STEPS // 2, math.floor(3.0 / costs[last.name]))


def test_a_named_site_or_number_of_steps_is_left_to_the_owner() -> None:
    target = deep(32, 2, size=16)
    names = [s.name for s in analyse(target).sites.values() if s.kind == "convolution"]
    _, key = stain(target, site=names[-1], steps=6, seed=0)
    assert key.site == names[-1]
