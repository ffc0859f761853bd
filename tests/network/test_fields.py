"""Receptive fields, compared with the pixels that actually change a position."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import Site, Target, analyse
from stainlock.target import evaluation_mode
from stainlock.trigger import seen_region

CONVENTIONS = {"mean": (0,), "std": (1,)}


def made_positive(model: nn.Module) -> nn.Module:
    """Positive weights in float64, which can't cancel: every pixel that a position sees then changes it."""
    model = model.double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.fill_(1 / module.weight[0].numel())
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()
                if module.affine:
                    nn.init.ones_(module.weight)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
    return model


class _Enough(Exception):
    """Ends a forward pass after the last site."""


def outputs(target: Target, sites: list[Site]) -> dict[str, list[Tensor]]:
    """Each site's output for an image, for copies with one row changed, and for copies with one column changed."""
    channels, height, width = target.input_shape
    base = 0.01 + 0.01 * torch.rand(1, channels, height, width, dtype=torch.float64)
    rows = base.repeat(height, 1, 1, 1)
    rows[range(height), :, range(height)] += 1
    columns = base.repeat(width, 1, 1, 1)
    columns[range(width), :, :, range(width)] += 1
    caught: dict[str, list[Tensor]] = {site.name: [] for site in sites}

    def catch(name: str, count: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, output: Tensor) -> None:
            caught[name].append(output)
            if min(len(maps) for maps in caught.values()) == count:
                raise _Enough

        return hook

    for count, images in enumerate((base, rows, columns), 1):
        hooks = [site.layer(target.model).register_forward_hook(catch(site.name, count)) for site in sites]
        try:
            with evaluation_mode(target.model), torch.no_grad(), suppress(_Enough):
                target.model(images)
        finally:
            for hook in hooks:
                hook.remove()
    return caught


def support(maps: list[Tensor], position: tuple[int, int]) -> list[tuple[int, int]]:
    """The rows and the columns, from the first to one past the last, that change a layer's output at a position."""
    before, *changed = (m[:, :, position[0], position[1]] for m in maps)
    spans = []
    for after in changed:
        seen = (after != before).any(1).nonzero()
        spans.append((int(seen.min()), int(seen.max()) + 1))
    return spans


def claimed(target: Target, site: Site, position: tuple[int, int]) -> list[tuple[int, int]]:
    region = seen_region(target, site, position)
    return [(start, start + size) for start, size in zip(region.start, region.size, strict=True)]


def check(target: Target, site: Site, position: tuple[int, int], true: list[tuple[int, int]]) -> None:
    """The field equals the support; at the far border it may include pixels that strides leave over."""
    assert site.field is not None
    where = (site.name, position)
    for axis, index, pixels, ours, theirs in zip(
        site.field, position, target.input_shape[1:], claimed(target, site, position), true, strict=True
    ):
        assert ours[0] == theirs[0], where
        beyond = axis.start + axis.jump * index + axis.size > pixels
        assert theirs[1] <= ours[1] <= theirs[1] + (axis.jump - 1 if beyond else 0), where


def positions(site: Site) -> list[tuple[int, int]]:
    height, width = site.grid
    return sorted({(0, 0), (height // 2, width // 3), (height - 1, width - 1), (0, width - 1), (1 % height, 1 % width)})


NETWORKS = {
    "torchvision:resnet18": ["conv1", "layer1.0.conv1", "layer1.1.conv2", "layer2.0.conv2", "layer2.0.downsample.0"],
    "torchvision:vgg11": ["features.0", "features.6", "features.8"],
    "torchvision:mobilenet_v2": ["features.0.0", "features.2.conv.1.0", "features.3.conv.0.0", "features.5.conv.1.0"],
    "torchvision:densenet121": [
        "features.conv0", "features.denseblock1.denselayer1.conv2", "features.denseblock1.denselayer3.conv1",
        "features.transition1.conv",
    ],
    "torchvision:squeezenet1_0": [
        "features.0", "features.3.squeeze", "features.4.expand3x3", "features.7.squeeze", "features.8.expand1x1",
    ],
    "torchvision:googlenet": ["conv2.conv", "conv3.conv", "inception3a.branch2.1.conv", "inception3b.branch1.conv"],
    "timm:tf_efficientnet_lite0": [
        "conv_stem", "blocks.0.0.conv_dw", "blocks.1.0.conv_dw", "blocks.1.1.conv_dw", "blocks.2.0.conv_dw",
        "blocks.3.0.conv_dw",
    ],
}  # fmt: skip


# Strides divide the width 48, and leave some of 47 rows and of 54 columns over.
@pytest.mark.parametrize("size", [(47, 48), pytest.param((48, 54), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "torchvision:vgg11" else name for name in NETWORKS]
)
def test_fields_are_the_support_in_real_networks(name: str, size: tuple[int, int]) -> None:
    model = made_positive(copy.deepcopy(models.library(name, 64).model))
    target = Target(model, (3, *size), **CONVENTIONS)
    sites = analyse(target).sites
    chosen = [sites[site_name] for site_name in NETWORKS[name]]
    maps = outputs(target, chosen)
    for site in chosen:
        assert site.field is not None, site.name
        for position in positions(site):
            check(target, site, position, support(maps[site.name], position))


CHAINS = {
    "plain": [nn.Conv2d(3, 4, 3)],
    "dilated": [nn.Conv2d(3, 4, 3, dilation=2, padding=2), nn.Conv2d(4, 4, 3, dilation=3, padding=1)],
    "even kernel": [nn.Conv2d(3, 4, 4, stride=2, padding=1), nn.Conv2d(4, 4, 2)],
    "asymmetric": [nn.Conv2d(3, 4, (3, 5), stride=(1, 2), padding=(1, 0)), nn.Conv2d(4, 4, (1, 7), padding=(0, 3))],
    "asymmetric dilation": [nn.Conv2d(3, 4, 3, dilation=(1, 3), padding=(0, 2)), nn.Conv2d(4, 4, 3)],
    "same padding": [nn.Conv2d(3, 4, 4, padding="same"), nn.Conv2d(4, 4, 3, padding="same", dilation=2)],
    "valid padding": [nn.Conv2d(3, 4, 5, padding="valid"), nn.Conv2d(4, 4, 3)],
    "ceil max pool": [nn.MaxPool2d(3, 2, ceil_mode=True), nn.Conv2d(3, 4, 3, padding=1)],
    "ceil average pool": [nn.AvgPool2d(3, 2, padding=1, ceil_mode=True), nn.Conv2d(3, 4, 3, padding=1)],
    "dilated max pool": [nn.MaxPool2d(3, 1, dilation=2), nn.Conv2d(3, 4, 3)],
    "uneven pools": [nn.MaxPool2d((2, 3), (1, 2)), nn.AvgPool2d((3, 1)), nn.Conv2d(3, 4, 3)],
    "default stride": [nn.MaxPool2d(3), nn.Conv2d(3, 4, 2)],
    "strided 1x1": [nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1, stride=2), nn.Conv2d(4, 4, 3, padding=1)],
    "reflected border": [nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 3)],
    "replicated border": [nn.Conv2d(3, 4, 5, padding=2, padding_mode="replicate"), nn.Conv2d(4, 4, 3, padding=1)],
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", CHAINS)
def test_fields_of_every_kind_of_window(name: str) -> None:
    model = made_positive(nn.Sequential(*CHAINS[name]))
    target = Target(model, (3, 22, 25), **CONVENTIONS)
    site = analyse(target).site(str(len(model) - 1))
    assert site.field is not None
    maps = outputs(target, [site])[site.name]
    for position in positions(site):
        check(target, site, position, support(maps, position))


class Wrapped(nn.Module):
    """Operations that are no layers, before the site ``last``."""

    def __init__(self, between: object, channels: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.side = nn.Conv2d(3, 4, 5, padding=2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.relu(self.first(x)), torch.relu(self.side(x))))  # type: ignore[operator]


OPERATIONS = {
    "sum": (lambda a, b: a + b, 4, True),
    "concatenation": (lambda a, b: torch.cat([a, b], 1), 8, True),
    "concatenation along rows": (lambda a, b: torch.cat([a, b], 2), 4, False),
    "concatenation along columns": (lambda a, b: torch.cat([a, b], dim=-1), 4, False),
    "gate": (lambda a, b: a * b.mean((2, 3), keepdim=True), 4, False),
    "row gate": (lambda a, b: a * b.mean(3, keepdim=True), 4, False),
    "functional pool": (lambda a, b: nn.functional.max_pool2d(a, 3, 2, ceil_mode=True), 4, True),
    "functional average pool": (lambda a, b: nn.functional.avg_pool2d(a, kernel_size=2), 4, True),
    "flipped": (lambda a, b: a + b.flip(3), 4, False),
    "shifted": (lambda a, b: a + torch.roll(b, 5, 2), 4, False),
    "transposed": (lambda a, b: a + b.transpose(2, 3), 4, False),
    "strided slice": (lambda a, b: a[:, :, ::2, ::2], 4, False),
    "softmax over space": (lambda a, b: a * b.flatten(2).softmax(2).view_as(b), 4, False),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_fields_contain_the_support_whatever_comes_between(name: str) -> None:
    between, channels, tight = OPERATIONS[name]
    target = Target(made_positive(Wrapped(between, channels)), (3, 24, 24), **CONVENTIONS)
    site = analyse(target).site("last")
    maps = outputs(target, [site])[site.name]
    for position in positions(site):
        ours, true = claimed(target, site, position), support(maps, position)
        for (first, last), (true_first, true_last) in zip(ours, true, strict=True):
            assert first <= true_first, (position, ours, true)
            assert true_last <= last, (position, ours, true)
        if tight:
            check(target, site, position, true)


def test_the_whole_input_is_seen_through_what_mixes_positions() -> None:
    site = analyse(models.library("torchvision:vit_b_16", 64)).site("encoder.layers.encoder_layer_0.mlp.0")
    assert site.field is None
    assert site.patch == (64, 64)


def test_patches_are_no_larger_than_the_image() -> None:
    target = models.library("torchvision:resnet18", 64)
    for site in analyse(target).sites.values():
        assert all(1 <= n <= 64 for n in site.patch), site.name


class ChannelsFirst(nn.LayerNorm):
    """Layer norm over the second axis, as torchvision, timm and transformers have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A ConvNeXt's block, with whatever lies between its first layer and its second."""

    def __init__(
        self, between: Callable[[Tensor], Tensor] = lambda x: x, norm: Callable[[], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=2)
        self.stem_norm = ChannelsFirst(8) if norm is None else norm()
        self.depthwise, self.norm = nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.gamma = nn.Parameter(torch.ones(8))
        self.down = nn.Conv2d(8, 8, 2, stride=2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x))
        y = self.between(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        y = self.gamma * self.second(torch.nn.functional.gelu(self.first(y)))
        return self.down(x + y.permute(0, 3, 1, 2))


def blocks(block: nn.Module) -> tuple[Target, list[Site]]:
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    target = Target(block.double().eval(), (3, 21, 26), **CONVENTIONS)
    sites = analyse(target).sites
    return target, [sites[name] for name in ("stem", "depthwise", "first", "second", "down")]


def test_fields_where_channels_are_last() -> None:
    target, sites = blocks(Block())
    maps = outputs(target, sites)
    for site in sites:
        assert site.field is not None, site.name
        own = [m.movedim(-1, 1) if site.kind == "linear" else m for m in maps[site.name]]
        for position in positions(site):
            check(target, site, position, support(own, position))


MIXED: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: Block(norm=lambda: nn.GroupNorm(2, 8)),
    "layer norm over positions too": lambda: Block(norm=lambda: nn.LayerNorm([8, 9, 12])),
    "rows joined": lambda: Block(lambda x: torch.cat([x[:, :4], x[:, 4:]], 1)),
    "rows moved": lambda: Block(lambda x: torch.nn.functional.pad(x[:, :-1], (0, 0, 0, 0, 1, 0))),
    "rows and columns exchanged": lambda: Block(lambda x: x.permute(0, 2, 1, 3).permute(0, 2, 1, 3)),
    "columns mixed": lambda: Block(lambda x: x @ torch.ones(8, 8, dtype=x.dtype)),
    "pooled": lambda: Block(lambda x: torch.nn.functional.avg_pool2d(x, 3, 1, 1)),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_may_mix_positions_sees_everything(name: str) -> None:
    """No field is claimed behind these, whether they mix positions or not."""
    _, sites = blocks(MIXED[name]())
    assert next(site for site in sites if site.name == "first").field is None
    assert next(site for site in sites if site.name == "stem").field is not None
