"""Which channel is replaced, and what folding its mean into the next layers saves."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from precision import EXACT
from torch import Tensor, nn

from stainlock import Target, analyse, stain, verify
from stainlock.network.norms import affine_of
from stainlock.stains.choice import _loss, l1_norms, outgoing_cost, rank_channels, site_moments
from stainlock.target import evaluation_mode


def reader_levels(target: Target, module: str, images: Tensor, *, rectified: bool = False) -> Tensor:
    """The mean of a layer's outputs, optionally after a ReLU, over images and positions, per channel."""
    caught: list[Tensor] = []
    handle = target.model.get_submodule(module).register_forward_hook(
        lambda _, __, output: caught.append(output.clone())
    )
    try:
        with evaluation_mode(target.model), torch.no_grad():
            target.predict(images)
    finally:
        handle.remove()
    outputs = caught[0].relu() if rectified else caught[0]
    return outputs.double().movedim(1, 0).flatten(1).mean(1)


@pytest.mark.parametrize(
    ("name", "site", "reader", "count"),
    [
        ("resnet20_cifar10", "layer1.1.conv1", "layer1.1.bn2", 4),
        ("resnet20_cifar10", "layer2.1.conv1", "layer2.1.bn2", 8),
    ],
)
@models.analysed_once()
def test_folding_brings_the_readers_mean_back(name: str, site: str, reader: str, count: int) -> None:
    """A quarter of the channels is replaced, so that some of them matter."""
    target, images = models.real(name), models.pixels(name, 100)
    moved = {}
    for fold in (False, True):
        marked, _ = stain(
            target, site=site, fold=fold, count=count, channel_choice="l1", seed=3, steps=8, firing_fraction=0.9
        )
        before, after = (reader_levels(t, reader, images) for t in (target, marked))
        moved[fold] = float((after - before).norm())
    assert moved[True] < 0.7 * moved[False]


@pytest.mark.parametrize("site", ["layer1.3.conv1", "layer2.3.conv1", "layer3.3.conv1"])
@models.analysed_once()
def test_batch_norm_knows_most_of_what_a_layers_channels_give_on_average(site: str) -> None:
    """Channels are not quite Gaussian: the estimate can be wrong for one channel, but not for a whole layer."""
    target, images = models.real("resnet56_cifar10"), models.pixels("resnet56_cifar10", 100)
    network = analyse(target)
    given = reader_levels(target, site.replace("conv1", "bn1"), images, rectified=True)
    own = network.sites[site]
    expected, _ = _loss(network, own, own.readers[0], site_moments(network, own))
    assert float((given - expected).norm()) < 0.5 * float(given.norm())


def test_folding_writes_the_readers_biases_or_running_means_alone() -> None:
    target = models.real("resnet20_cifar10")
    _, key = models.stained("resnet20_cifar10", "layer2.1.conv1", fold=True, count=2)
    parts = {w.parameter: w.part for w in key.revert.writes}
    assert {p for p, part in parts.items() if part == "fold"} == {"layer2.1.bn2.running_mean"}
    assert len([w for w in key.revert.writes if w.part == "fold"]) == 1
    (fold,) = [w for w in key.revert.writes if w.part == "fold"]
    assert torch.equal(fold.values, target.model.layer2[1].bn2.running_mean)


@pytest.mark.parametrize("name", ["resnet20_cifar10", pytest.param("vgg16_cifar10", marks=pytest.mark.slow)])
@pytest.mark.parametrize("folded", [False, True])
@models.analysed_once()
def test_harm_is_what_readers_miss(name: str, folded: bool) -> None:
    """The estimate without data correlates with the loss measured on images."""
    site_name, reader = {
        "resnet20_cifar10": ("layer2.1.conv1", "layer2.1.bn2"),
        "vgg16_cifar10": ("features.5", "features.7"),
    }[name]
    target = models.real(name)
    network = analyse(target)
    site = network.site(site_name)
    estimate = outgoing_cost(network, site, folded=folded)
    assert estimate is not None
    assert estimate.shape == (site.channels,)
    images = models.pixels(name, 16)
    measured = []
    caught: list[Tensor] = []
    last = target.copy()
    last.model.get_submodule(reader).register_forward_hook(lambda _, __, output: caught.append(output.double()))
    switched: dict[str, int] = {}

    def silence(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if "channel" not in switched:
            return None
        output = output.clone()
        output[:, switched["channel"]] = -1e3
        return output

    last.model.get_submodule(site.norm or site.name).register_forward_hook(silence)
    with torch.no_grad():
        last.predict(images)
        for channel in range(0, site.channels, max(1, site.channels // 16)):
            switched["channel"] = channel
            last.predict(images)
            lost = (caught[0] - caught.pop()).movedim(1, 0).flatten(1)
            spread = lost.std(1) if folded else lost.square().mean(1).sqrt()
            measured.append(float(spread.norm()))
    ours = estimate[:: max(1, site.channels // 16)]
    ranks = [torch.tensor(v).argsort().argsort().double() for v in (ours.tolist(), measured)]
    correlation = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    assert correlation > 0.7


@pytest.mark.parametrize("choice", ["outgoing", "l1"])
@models.analysed_once()
def test_the_least_missed_channel_is_given_up(choice: Any) -> None:
    target = models.real("resnet20_cifar10")
    network = analyse(target)
    site = network.site("layer2.1.conv1")
    harm = l1_norms(network, site) if choice == "l1" else outgoing_cost(network, site, folded=False)
    assert harm is not None
    _, key = stain(target, site=site.name, channel_choice=choice, count=3, seed=1)
    chosen = {d.channel for d in key.detectors}
    assert chosen == set(harm.argsort()[:3].tolist())
    assert rank_channels(network, site, choice, folded=False, live=False)[0] == int(harm.argmin())


@models.analysed_once()
def test_l1_norms_are_the_papers() -> None:
    target = models.real("resnet20_cifar10")
    network = analyse(target)
    expected = target.model.layer2[1].conv1.weight.detach().double().abs().sum((1, 2, 3))
    torch.testing.assert_close(l1_norms(network, network.site("layer2.1.conv1")), expected, rtol=EXACT, atol=0)
    transposed = models.transposed_net()
    expected = transposed.model.deconv.weight.detach().double().abs().sum((0, 2, 3))
    torch.testing.assert_close(
        l1_norms(analyse(transposed), analyse(transposed).site("deconv")), expected, rtol=EXACT, atol=0
    )


def test_additive_stains_hide_in_channels_that_live() -> None:
    target = models.conv_net()
    with torch.no_grad():
        target.model.conv.weight[:6] *= 1e-3
        target.model.norm.weight[6:9] *= 1e-4
    for seed in range(3):
        _, key = stain(target, site="conv", additive=True, count=4, seed=seed, steps=30)
        assert not {d.channel for d in key.detectors} & set(range(9))


def test_the_affine_map_is_batch_norms() -> None:
    norm = models.settle(nn.BatchNorm2d(12))
    affine = affine_of(norm)
    maps = torch.randn(3, 12, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = norm.double()(maps)
    found = affine.g.view(1, -1, 1, 1) * maps + affine.h.view(1, -1, 1, 1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "site"), [("resnet20_cifar10", "layer2.1.conv1"), ("vgg16_cifar10", "features.2")])
@models.analysed_once()
def test_a_second_stain_leaves_the_first_alone(name: str, site: str) -> None:
    target = models.real(name)
    first, own = stain(target, site=site, seed=0, steps=10)
    second, other = stain(first, site=site, seed=1, steps=10)
    assert own.detectors[0].channel != other.detectors[0].channel
    assert verify(second, own).stained
    assert verify(second, other).stained
