"""Channel costs along a lock's signal, and moments folded into batch norms, both from batch-norm statistics."""

from __future__ import annotations

from functools import cache

import models
import numpy as np
import pytest
import torch
from precision import EXACT, double
from torch import Tensor
from torch.fx import Node

from stainlock import Plan, Target
from stainlock.locks.parts.conduit import Disguise
from stainlock.locks.parts.disruptor import half_open, neutral_writes, new_block
from stainlock.locks.parts.route import Cell, Reading, column_shares, fold_moments, remembered
from stainlock.network.network import Network, analyse, input_of
from stainlock.network.ops import Moments
from stainlock.numerics import Randomness, exact


@cache
def _efficientnet() -> tuple[Network, dict[Node, Tensor], dict[Node, Moments]]:
    """The network without new blocks, shared by the forms of blocks, its channel costs and what its norms remember."""
    network = analyse(models.real("efficientnet_lite0"))
    return network, column_shares(network), remembered(network)


@pytest.mark.parametrize("form", ["signed", "shifts", "gains"])
def test_new_blocks_leave_channel_costs_as_they_are(form: str) -> None:
    """The cheapest channel is the same one with or without new blocks."""
    before, ours, own = _efficientnet()
    base = before.target
    names = ["blocks.3.0.conv_pw", "blocks.5.0.conv_pwl"]
    insertions = tuple(new_block(before, name, [before.nodes[name]], form) for name in names)  # type: ignore[arg-type]
    prepared = Plan(insertions=insertions).apply(base)
    Plan(tuple(w for own in insertions for w in half_open(prepared.model, own))).write_into(prepared.model)
    after = analyse(prepared)
    shares = column_shares(after)
    for name in names:
        torch.testing.assert_close(shares[after.nodes[f"{name}.layer"]], ours[before.nodes[name]])
    disguise, generator = Disguise(Randomness(0), rounded=True), np.random.default_rng(0)
    writes = [
        w for b in after.blocks.values() for w in neutral_writes(before.target, after, b, form, disguise, generator)
    ]  # type: ignore[arg-type]
    Plan(tuple(writes)).write_into(prepared.model)
    theirs = remembered(after)
    for name in names:
        gate = after.part.leaf(after.nodes[f"{name}.gate.fc2"])
        gains = exact(gate, "bias").tanh() if form == "signed" else exact(gate, "bias").sigmoid()
        shifts = 0.0 if form == "gains" else exact(after.part.leaf(after.nodes[f"{name}.gate.fc3"]), "bias")
        mean, deviation = own[before.nodes[name].all_input_nodes[0]]
        found = theirs[after.nodes[f"{name}.layer"].all_input_nodes[0]]
        torch.testing.assert_close(found[0], gains * mean + shifts)
        torch.testing.assert_close(found[1], gains.abs() * deviation)


def test_the_variance_counts_and_not_the_mean() -> None:
    """Means are folded into biases, so a large constant channel costs nothing."""
    base = models.real("resnet20_cifar10").copy()
    norm = base.model.get_submodule("layer2.1.bn1")
    with torch.no_grad():
        norm.bias[3], norm.weight[3] = 50.0, 1e-4  # type: ignore[index, operator]
    network = analyse(base)
    shares = column_shares(network)[network.nodes["layer2.1.conv2"]]
    assert float(shares[3]) <= 1e-6 * float(shares.median())


@pytest.mark.exact
def test_lost_moments_are_subtracted_from_the_next_batch_norm() -> None:
    """Mean and variance for a channel that can be negative; the mean alone for one behind a ReLU."""
    base = double(models.real("efficientnet_lite0"))
    network = analyse(base)
    for layer, norm, signed in (
        ("blocks.3.1.conv_pw", "blocks.3.1.bn1", True),
        ("blocks.3.1.conv_pwl", "blocks.3.1.bn3", False),
    ):
        reader = network.nodes[layer]
        source = reader.all_input_nodes[0]
        mean, deviation = (float(moment[5]) for moment in remembered(network)[source])
        writes = fold_moments(network, [Reading(reader, Cell(source, 5))], [(reader, 0)], "conduit")
        before = base.model.get_submodule(norm)
        after = Plan(tuple(writes)).apply(base).model.get_submodule(norm)
        taps = exact(network.part.leaf(reader), "weight")[:, 5].flatten()
        taps[0] = 0.0  # a rewritten row loses nothing
        told = {own: exact(before, own) - exact(after, own) for own in ("running_mean", "running_var")}
        torch.testing.assert_close(told["running_mean"], taps * mean, rtol=EXACT, atol=EXACT)
        most = 0.5 * exact(before, "running_var")
        lost = torch.minimum((taps * deviation).square(), most) if signed else torch.zeros_like(most)
        assert signed == (float(lost.max()) > 1e-4), "far above what rounding may hide"
        torch.testing.assert_close(told["running_var"], lost, rtol=EXACT, atol=EXACT)


def test_behind_a_relu_the_lost_variance_is_underestimated() -> None:
    """On natural images, a layer without one channel of ResNet56's stream loses more variance than estimated."""
    base = models.real("resnet56_cifar10")
    network = analyse(base)
    reader, norm = network.nodes["layer2.0.conv1"], "layer2.0.bn1"
    deviation = remembered(network)[reader.all_input_nodes[0]][1]
    images = models.pixels("resnet56_cifar10", 100)
    whole, usual = _variances(base, norm, images), exact(base.model.get_submodule(norm), "running_var")
    for channel in (0, 3, 7):
        taps = exact(network.part.leaf(reader), "weight")[:, channel].flatten(1)
        own = (taps.sum(1).square() + taps.square().sum(1)) / 2 * deviation[channel].square()
        less = _without(base, "layer2.0.conv1", channel, norm, images)
        assert float((less / whole).log().mean()) < 1.5 * float((1 - own / usual).log().mean()) < 0


def test_folding_variances_helps() -> None:
    """On natural images, the estimated loss of variance without a channel is close to the measured one."""
    base = models.real("efficientnet_lite0")
    network = analyse(base)
    reader, norm = network.nodes["blocks.3.0.conv_pw"], "blocks.3.0.bn1"
    source = reader.all_input_nodes[0]
    images = models.pixels("efficientnet_lite0", 6)
    usual, whole = exact(base.model.get_submodule(norm), "running_var"), _variances(base, norm, images)
    for channel in (2, 10, 26):
        writes = fold_moments(network, [Reading(reader, Cell(source, channel))], [], "conduit")
        (told,) = (w.values.double() for w in writes if w.parameter.endswith("running_var"))
        less = _without(base, "blocks.3.0.conv_pw", channel, norm, images)
        assert float((less / whole / (told / usual)).log().norm()) < 0.9 * float((less / whole).log().norm())


def _variances(target: Target, layer: str, images: Tensor) -> Tensor:
    with torch.no_grad():
        return input_of(target, layer, images).double().transpose(0, 1).flatten(1).var(1)


def _without(base: Target, layer: str, channel: int, norm: str, images: Tensor) -> Tensor:
    """The variance of a layer's outputs without a channel."""
    less = base.copy()
    with torch.no_grad():
        less.model.get_submodule(layer).weight[:, channel] = 0.0  # type: ignore[index, operator]
    return _variances(less, norm, images)
