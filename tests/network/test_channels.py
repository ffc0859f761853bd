"""Which layers write, scale and read a channel, checked by changing the channel in the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock import Site, Target, analyse, stain, verify
from stainlock.network.graph import trace, tracing_problem
from stainlock.network.ops import op_of
from stainlock.target import evaluation_mode

LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
ARCHITECTURES = [
    "torchvision:resnet50", "torchvision:vgg16", "torchvision:vgg16_bn", "torchvision:mobilenet_v2",
    "torchvision:mobilenet_v3_large", "torchvision:efficientnet_b0", "torchvision:densenet121",
    "torchvision:googlenet", "torchvision:vit_b_16", "torchvision:swin_t", "torchvision:convnext_tiny",
    "torchvision:squeezenet1_0", "torchvision:shufflenet_v2_x1_0", "torchvision:mnasnet0_5",
    "timm:seresnet50", "timm:regnety_004", "timm:convnext_atto", "timm:tf_efficientnet_lite0",
    "timm:mobilenetv3_small_050",
]  # fmt: skip
SAMPLE = 8  # sites of each architecture, spread over its depth; half of them every time
# Others of the same kinds are tested every time.
SLOW = (
    "torchvision:vgg16",
    "torchvision:vgg16_bn",
    "torchvision:vit_b_16",
    "torchvision:convnext_tiny",
    "timm:seresnet50",
)
LARGE = ("vit_b_16", "vgg16", "vgg16_bn", "resnet50")  # fewer sites of these


def is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels == layer.out_channels


def changed_inputs(target: Target, name: str, channel: int) -> dict[str, set[int]]:
    """Which layers' inputs change, and in which channels, when one channel of a layer's output does.

    Every layer that mixes channels returns its previous outputs, so only the first such layer on each path is found.
    """
    recorded: dict[str, list[tuple[Tensor, Tensor]]] = {}
    calls: dict[str, int] = {}
    found: dict[str, set[int]] = {}
    shift = 0.0

    def record(layer_name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            recorded.setdefault(layer_name, []).append((given[0].clone(), output.clone()))

        return hook

    def compare(layer_name: str, layer: nn.Module) -> Callable[..., Tensor | None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            call = calls[layer_name] = calls.get(layer_name, -1) + 1
            before, result = recorded[layer_name][call]
            axis = -1 if isinstance(layer, nn.Linear) else 1
            if layer_name == name:
                result = result.clone()
                mine = result.select(axis, channel)
                mine.add_(shift * (1 + torch.rand_like(mine)) * result.abs().amax().clamp(min=1))
                return result
            if is_depthwise(layer):
                return None
            differs = (given[0] != before).movedim(axis, 0).flatten(1).any(1)
            if bool(differs.any()):
                found.setdefault(layer_name, set()).update(differs.nonzero().squeeze(1).tolist())
            return result.clone()  # activations after it may work in place

        return hook

    images = torch.rand(1, *target.input_shape)
    layers = {n: m for n, m in target.model.named_modules() if isinstance(m, LAYERS)}
    for make, shifts in ((lambda n, m: record(n), (0.0,)), (compare, (30.0, -30.0, 2.0, -2.0))):
        handles = [m.register_forward_hook(make(n, m)) for n, m in layers.items()]
        try:
            for shift in shifts:  # noqa: B007  the hooks use it
                calls.clear()
                with evaluation_mode(target.model), torch.no_grad():
                    target.predict(images)
        finally:
            for handle in handles:
                handle.remove()
    return found


def claimed_inputs(site: Site, channel: int) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for reader in site.readers:
        found.setdefault(reader.module, set()).update(reader.inputs(channel))
    return found


def check_readers(target: Target, site: Site, channel: int) -> None:
    claimed, found = claimed_inputs(site, channel), changed_inputs(target, site.name, channel)
    for module, inputs in claimed.items():
        seen = found.get(module, set())
        assert inputs <= seen, f"{site.name} is read by {module}"
        if not site.stops:  # untraced paths may lead there too
            assert inputs == seen, f"{site.name} is read by {module}"
    if not site.stops:
        assert found.keys() == claimed.keys(), site.name
    assert len(site.readers) == len(claimed), f"{site.name} names a reader twice"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ARCHITECTURES]
)
def test_readers_are_the_layers_that_see_the_channel(name: str) -> None:
    check_sites(name, every=1 if name.endswith(LARGE) else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.endswith(LARGE)])
def test_readers_of_more_sites_are_the_layers_that_see_the_channel(name: str) -> None:
    check_sites(name, every=1)


def check_sites(name: str, every: int) -> None:
    """Sites of an architecture, spread over its depth, and two without readers; of these, one in ``every``."""
    target = models.library(name, 64)
    sites = list(analyse(target).sites.values())
    read = [site for site in sites if site.readers]
    assert read, "no readers at all"
    sample = 3 if name.endswith(LARGE) else SAMPLE
    chosen = read[:: max(1, len(read) // sample)] + [s for s in sites if not s.readers][:2]
    for index, site in list(enumerate(chosen))[::every]:
        check_readers(target, site, (7 * index + 3) % site.channels)


EXPECTED = [  # (model, site, norm, activation, readers with their first input of channel 0, what it stops at)
    ("torchvision:resnet50", "layer1.0.conv1", "layer1.0.bn1", "relu", {"layer1.0.conv2": 0}, []),
    ("torchvision:resnet50", "layer1.0.conv3", "layer1.0.bn3", None,
     dict.fromkeys(["layer1.1.conv1", "layer1.2.conv1", "layer2.0.conv1", "layer2.0.downsample.0"], 0), []),
    ("torchvision:resnet50", "conv1", "bn1", "relu", {"layer1.0.conv1": 0, "layer1.0.downsample.0": 0}, []),
    ("torchvision:vgg16", "features.0", None, "relu", {"features.2": 0}, []),
    ("torchvision:vgg16", "features.28", None, "relu", {"classifier.0": 0}, []),
    ("torchvision:vgg16_bn", "features.0", "features.1", "relu", {"features.3": 0}, []),
    ("torchvision:vgg16", "classifier.6", None, None, {}, ["the model's output"]),
    ("torchvision:mobilenet_v2", "features.2.conv.0.0", "features.2.conv.0.1", "relu6", {"features.2.conv.2": 0}, []),
    ("torchvision:mobilenet_v3_large", "features.2.block.0.0", "features.2.block.0.1", "relu",
     {"features.2.block.2.0": 0}, []),
    ("torchvision:efficientnet_b0", "features.2.0.block.0.0", "features.2.0.block.0.1", "silu",
     {"features.2.0.block.2.fc1": 0, "features.2.0.block.3.0": 0}, []),
    ("torchvision:densenet121", "features.denseblock1.denselayer1.conv1", "features.denseblock1.denselayer1.norm2",
     "relu", {"features.denseblock1.denselayer1.conv2": 0}, []),
    ("torchvision:googlenet", "inception3a.branch1.conv", "inception3a.branch1.bn", "relu",
     {f"inception3b.{branch}.conv": 0 for branch in ("branch1", "branch2.0", "branch3.0", "branch4.1")}, []),
    ("torchvision:googlenet", "inception3a.branch4.1.conv", "inception3a.branch4.1.bn", "relu",
     {f"inception3b.{branch}.conv": 224 for branch in ("branch1", "branch2.0", "branch3.0", "branch4.1")}, []),
    ("torchvision:vit_b_16", "encoder.layers.encoder_layer_3.mlp.0", None, "gelu",
     {"encoder.layers.encoder_layer_3.mlp.3": 0}, []),
    ("torchvision:swin_t", "features.1.0.mlp.0", None, "gelu", {"features.1.0.mlp.3": 0}, []),
    ("torchvision:convnext_tiny", "features.1.0.block.3", None, "gelu", {"features.1.0.block.5": 0}, []),
    ("timm:seresnet50", "layer1.0.conv1", "layer1.0.bn1", "relu", {"layer1.0.conv2": 0}, []),
    ("timm:regnety_004", "s1.b1.conv1.conv", "s1.b1.conv1.bn", "relu", {}, ["grouped layer s1.b1.conv2.conv"]),
    ("timm:convnext_atto", "stages.0.blocks.0.mlp.fc1", None, "gelu", {"stages.0.blocks.0.mlp.fc2": 0}, []),
    ("timm:tf_efficientnet_lite0", "blocks.1.0.conv_pw", "blocks.1.0.bn1", "relu6", {"blocks.1.0.conv_pwl": 0}, []),
]  # fmt: skip


@pytest.mark.parametrize("model", dict.fromkeys(name for name, *_ in EXPECTED))
def test_what_follows_a_channel(model: str) -> None:
    network = analyse(models.library(model, 64))
    for name, site_name, norm, activation, readers, stopped in EXPECTED:
        if name != model:
            continue
        site = network.site(site_name)
        assert site.norm == norm, site_name
        assert (site.activation and site.activation.name) == activation, site_name
        assert {reader.module: reader.inputs(0)[0] for reader in site.readers} == readers, site_name
        assert len(site.stops) == len(stopped), site_name
        assert all(said in str(why) for said, why in zip(stopped, site.stops, strict=True)), site_name
        assert (site.problem is None) == (activation is not None), site_name


def test_a_gate_is_told_from_what_it_gates() -> None:
    """The last layer of a squeeze-and-excite block gates a product: silencing it would silence a channel for good."""
    sites = analyse(models.library("torchvision:efficientnet_b0", 64)).sites
    gate = sites["features.6.0.block.2.fc2"]
    assert gate.activation is not None
    assert gate.activation.name == "sigmoid"
    assert "gates" in str(gate.problem)
    squeeze = sites["features.6.0.block.2.fc1"]
    assert [reader.module for reader in squeeze.readers] == ["features.6.0.block.2.fc2"]
    assert squeeze.problem is None or "dimension" in squeeze.problem


class Piece(nn.Module):
    """A site ``a``, then ``between``, then a layer ``b``."""

    def __init__(self, a: nn.Module, between: Callable[[Tensor], Tensor], b: nn.Module, *extra: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.extra = a, b, nn.ModuleList(extra)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(torch.relu(self.a(x))))


class Tokens(Piece):
    """The same among tokens ``(N, T, C)``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(torch.relu(self.a(x.flatten(2).transpose(1, 2)))))


class Moved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


def with_self(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)


PIECES: dict[str, Callable[[], nn.Module]] = {
    "flatten": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: torch.flatten(x, 1), nn.Linear(8 * 36, 5)),
    "flatten method": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.flatten(1), nn.Linear(8 * 36, 5)),
    "flatten named": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.flatten(start_dim=1), nn.Linear(8 * 36, 5)),
    "flatten last": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.flatten(-3), nn.Linear(8 * 36, 5)),
    "flatten of space": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.flatten(2), nn.Linear(36, 5)),
    "flatten module of space": lambda: Piece(nn.Conv2d(16, 8, 3), nn.Flatten(2), nn.Linear(36, 5)),
    "flatten of two axes": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.flatten(1, 2), nn.Linear(6, 5)),
    "view": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.view(x.size(0), -1), nn.Linear(8 * 36, 5)),
    "reshape": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.reshape(-1, 8 * 36), nn.Linear(8 * 36, 5)),
    "mean over space": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.mean([2, 3]), nn.Linear(8, 5)),
    "mean over space, negative": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.mean((-1, -2)), nn.Linear(8, 5)),
    "mean over channels": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.mean(1), nn.Linear(6, 5)),
    "mean over channels and rows": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.mean((1, 2)), nn.Linear(6, 5)),
    "pad space": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: F.pad(x, (1, 1, 1, 1)), nn.Conv2d(8, 5, 3)),
    "pad channels": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: F.pad(x, (0, 0, 0, 0, 4, 4)), nn.Conv2d(16, 5, 3)),
    "channel shuffle": lambda: Piece(nn.Conv2d(16, 8, 3), nn.ChannelShuffle(2), nn.Conv2d(8, 5, 3)),
    "pixel shuffle": lambda: Piece(nn.Conv2d(16, 8, 3), nn.PixelShuffle(2), nn.Conv2d(2, 5, 3)),
    "pixel shuffle function": lambda: Piece(
        nn.Conv2d(16, 8, 3), lambda x: F.pixel_shuffle(x, 2), nn.Conv2d(2, 5, 3)
    ),
    "pixel unshuffle": lambda: Piece(nn.Conv2d(16, 8, 3), nn.PixelUnshuffle(2), nn.Conv2d(32, 5, 3)),
    "split": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.chunk(2, 1)[1], nn.Conv2d(4, 5, 3)),
    "slice of channels": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x[:, 2:6], nn.Conv2d(4, 5, 3)),
    "permute": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.permute(0, 2, 3, 1), nn.Linear(8, 5)),
    "permute and back": lambda: Piece(
        nn.Conv2d(16, 8, 3), lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2), nn.Conv2d(8, 5, 3)
    ),
    "permute twice": lambda: Piece(
        nn.Conv2d(16, 8, 3), lambda x: x.permute(0, 2, 3, 1).permute(0, 2, 3, 1), nn.Conv2d(6, 5, 3)
    ),
    "permute positions": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.permute(0, 1, 3, 2), nn.Conv2d(8, 5, 3)),
    "permute in front of the activation": lambda: Piece(
        nn.Sequential(nn.Conv2d(16, 8, 3), Moved()), lambda x: x, nn.Linear(8, 5)
    ),
    "cat with itself": lambda: Piece(nn.Conv2d(16, 8, 3), with_self, nn.Conv2d(16, 5, 3)),
    "cat negative axis": lambda: Piece(
        nn.Conv2d(16, 8, 3), lambda x: torch.cat([x[:, :3], x], -3), nn.Conv2d(11, 5, 3)
    ),
    "cat along rows": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: torch.cat([x * 2, x], 2), nn.Conv2d(8, 5, 3)),
    "cat of channels": lambda: Piece(
        nn.Conv2d(16, 8, 3), lambda x: torch.cat([x[:, :3] * 0, x], 1), nn.Conv2d(11, 5, 3)
    ),
    "sum in place": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: (x * 2).add_(x), nn.Conv2d(8, 5, 3)),
    "sum with a factor": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: torch.add(x, x, alpha=2), nn.Conv2d(8, 5, 3)),
    "every other position": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x[:, :, ::2, ::2], nn.Conv2d(8, 5, 3)),
    "shortcut of CIFAR ResNets": lambda: Piece(
        nn.Conv2d(16, 8, 3), lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4)), nn.Conv2d(16, 5, 3)
    ),
    "flip of channels": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.flip(1), nn.Conv2d(8, 5, 3)),
    "unbind": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: torch.stack(x.unbind(1)[:4], 1), nn.Conv2d(4, 5, 3)),
    "own gate": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x * torch.sigmoid(x), nn.Conv2d(8, 5, 3)),
    "product with its mean": lambda: Piece(
        nn.Conv2d(16, 8, 3), lambda x: x * x.mean(1, keepdim=True), nn.Conv2d(8, 5, 3)
    ),
    "softmax over channels": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.softmax(1), nn.Conv2d(8, 5, 3)),
    "grouped reader": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x, nn.Conv2d(8, 6, 3, groups=2)),
    "tokens": lambda: Tokens(nn.Linear(16, 8), lambda x: x, nn.Linear(8, 5)),
    "flattened tokens": lambda: Tokens(nn.Linear(16, 8), lambda x: torch.flatten(x, 1), nn.Linear(64 * 8, 5)),
    "mean of tokens": lambda: Tokens(nn.Linear(16, 8), lambda x: x.mean(1), nn.Linear(8, 5)),
    "class token": lambda: Tokens(nn.Linear(16, 8), lambda x: torch.cat([x[:, :1] * 0, x], 1), nn.Linear(8, 5)),
    "tokens as a map": lambda: Tokens(
        nn.Linear(16, 8), lambda x: x.transpose(1, 2).unflatten(2, (8, 8)), nn.Conv2d(8, 5, 3)
    ),
    "mixed tokens": lambda: Tokens(nn.Linear(16, 64), lambda x: x.transpose(1, 2), nn.Linear(64, 5)),
    "layer norm over channels": lambda: Piece(
        nn.Conv2d(16, 8, 3), lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)), nn.Linear(8, 5)
    ),
    "instance norm": lambda: Piece(nn.Conv2d(16, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 5, 3)),
    "group norm": lambda: Piece(nn.Conv2d(16, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 5, 3)),
    "upsampling": lambda: Piece(nn.Conv2d(16, 8, 3), nn.Upsample(scale_factor=2), nn.Conv2d(8, 5, 3)),
    "prelu": lambda: Piece(nn.Conv2d(16, 8, 3), nn.PReLU(8), nn.Conv2d(8, 5, 3)),
    "max pool over channels": lambda: Piece(nn.Conv2d(16, 8, 3), lambda x: x.amax(1, keepdim=True), nn.Conv2d(1, 5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_nothing_is_guessed(name: str) -> None:
    """Readers and their inputs are correct; if an operation has no rule, it is named and no reader is claimed."""
    piece = PIECES[name]()
    target = Target(piece.eval(), (16, 8, 8), mean=(0,), std=(1,))
    site = analyse(target).site("a" if isinstance(piece.a, LAYERS) else "a.0")
    for channel in (0, 3):
        check_readers(target, site, channel)
    assert site.readers or site.stops
    for why in site.stops:
        assert str(why).strip(), "a stop without a reason"


@pytest.mark.parametrize("name", ["view", "reshape", "sum in place", "every other position", "pad channels",
                                  "shortcut of CIFAR ResNets", "cat of channels", "permute", "permute and back",
                                  "permute in front of the activation", "pixel unshuffle"])  # fmt: skip
def test_a_channel_is_followed_through(name: str) -> None:
    """These have rules: the reader is found, not just refused."""
    piece = PIECES[name]()
    site = analyse(Target(piece.eval(), (16, 8, 8), mean=(0,), std=(1,))).site(
        "a" if isinstance(piece.a, LAYERS) else "a.0"
    )
    assert [reader.module for reader in site.readers] == ["b"]
    assert site.activation is not None, "the one behind the permutation silences it, too"


class Wrapped(nn.Module):
    """Preprocessing inside the module, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.2, 0.3, 0.2]).view(1, 3, 1, 1))
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(((x.flip(1) - self.mean) / self.std).contiguous())))


def test_preprocessing_inside_a_module_is_no_obstacle() -> None:
    """A buffer called mean is not the operation mean, and flipping the colour channels does not mix positions."""
    sites = analyse(Target(Wrapped().eval(), (3, 16, 16), mean=(0,), std=(1,))).sites
    assert [reader.module for reader in sites["a"].readers] == ["b"]
    assert (sites["a"].patch, sites["b"].patch) == ((3, 3), (5, 5))


@pytest.mark.parametrize(
    "before",
    [lambda x: x.float() / 255, lambda x: x.to(torch.float32) * 2 - 1, lambda x: x[:, [2, 1, 0]],
     lambda x: x[..., [2, 1, 0], :, :], lambda x: x.index_select(1, torch.tensor([2, 1, 0])),
     lambda x: torch.cat([x[:, 2:], x[:, 1:2], x[:, :1]], 1)],
    ids=["bytes", "symmetric", "BGR", "BGR by ellipsis", "BGR by index_select", "BGR by slices"],
)  # fmt: skip
def test_scaling_and_exchanged_colours_do_not_mix_positions(before: Callable[[Tensor], Tensor]) -> None:
    class Scaled(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(before(x))))

    sites = analyse(Target(Scaled().eval(), (3, 16, 16), mean=(0,), std=(1,))).sites
    assert (sites["a"].patch, sites["b"].patch) == ((3, 3), (5, 5))


@pytest.mark.parametrize(
    "mixed", [lambda x: x[:, :, [5, 4, 3, 2, 1, 0]], lambda x: x[..., 1:], lambda x: x.to(torch.int32) / 2]
)
def test_other_indices_and_rounding_are_not_taken_for_it(mixed: Callable[[Tensor], Tensor]) -> None:
    class Mixed(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(mixed(x))))

    assert analyse(Target(Mixed().eval(), (3, 16, 16), mean=(0,), std=(1,))).sites["a"].field is None


def test_chunks_depend_on_the_image() -> None:
    """An operation that returns several tensors has no single shape, but its outputs depend on the image."""
    piece = PIECES["split"]()
    site = analyse(Target(piece.eval(), (16, 8, 8), mean=(0,), std=(1,))).site("b")
    assert site.additive_problem is None or "depend" not in site.additive_problem


def test_frozen_batch_norm_is_batch_norm() -> None:
    from torchvision.models import resnet18
    from torchvision.ops.misc import FrozenBatchNorm2d

    target = Target(resnet18(norm_layer=FrozenBatchNorm2d).eval(), (3, 64, 64))
    site = analyse(target).site("layer1.0.conv1")
    assert site.norm == "layer1.0.bn1"
    assert site.activation is not None
    assert [reader.module for reader in site.readers] == ["layer1.0.conv2"]


@pytest.mark.parametrize("activation", [nn.PReLU, nn.ReLU, nn.Identity])
def test_a_batch_norm_with_an_activation_of_its_own(activation: Any) -> None:
    """timm's BatchNormAct2d: its activation is recognised, or following the channel stops there."""
    from timm.layers import BatchNormAct2d

    model = nn.Sequential(
        nn.Conv2d(16, 8, 3), BatchNormAct2d(8, act_layer=activation), nn.Sigmoid(), nn.Conv2d(8, 4, 3)
    )
    site = analyse(Target(model.eval(), (16, 8, 8), mean=(0,), std=(1,))).site("0")
    expected = {nn.PReLU: None, nn.ReLU: "relu", nn.Identity: "sigmoid"}[activation]
    assert (site.activation and site.activation.name) == expected


def test_a_norm_used_twice_is_nobodys_own() -> None:
    """Writing a threshold into a batch norm that two layers share would change the other layer's channel."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.head = nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.norm(self.a(x))) + torch.relu(self.norm(self.b(x))))

    sites = analyse(Target(Shared().eval(), (3, 12, 12))).sites
    assert sites["a"].problem
    assert sites["b"].problem


def test_a_layer_called_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.again, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.stem(x))
            return self.head(torch.relu(self.again(torch.relu(self.again(x)))))

    site = analyse(Target(Twice().eval(), (3, 12, 12))).site("again")
    assert "more than once" in str(site.problem)
    assert "more than once" in str(site.additive_problem)


def test_two_paths_before_the_activation_leave_no_silence() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(torch.relu(x)) + self.c(x)

    target = Target(Fork().eval(), (3, 12, 12))
    site = analyse(target).site("a")
    assert site.activation is None
    assert site.problem
    check_readers(target, site, 2)


@pytest.mark.parametrize("folder", ["mine", "stainlock", "torch"])
def test_where_tracing_stops_is_told_whatever_folder_the_code_lies_in(folder: str, tmp_path: Path) -> None:
    """For example, a clone of this repository is a folder called stainlock."""
    file = tmp_path / folder / "moody.py"
    file.parent.mkdir()
    file.write_text("def forward(self, x):\n    return x if x.mean() > 0 else -x\n")
    own: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), own)
    problem = tracing_problem(type("Moody", (nn.Module,), {"forward": own["forward"]})())
    assert problem is not None
    assert problem.startswith("at `return x if x.mean() > 0 else -x` in forward, moody.py: ")


class SuperResolution(nn.Module):
    """A sub-pixel network: one activation after the first shuffle, none before the last."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.last = nn.Conv2d(8, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_shuffle(self.wide(self.first(x).relu()), 2)
        return F.pixel_shuffle(self.last(self.norm(x).relu()), 2)


def test_an_activation_behind_a_pixel_shuffle_silences_the_channels_before_it() -> None:
    target = Target(models.seeded(SuperResolution), (3, 16, 16), mean=(0.5,), std=(0.5,))
    network = analyse(target)
    wide, last = network.site("wide"), network.site("last")
    assert wide.problem is None
    assert wide.activation is not None
    assert not wide.readers
    assert last.problem is not None
    assert "no activation silences" in last.problem
    marked, key = stain(target, site="wide", seed=3)
    image = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        below = models.pre_activation(marked, analyse(marked).site("wide"), image)[0, key.detectors[0].channel]
        fired = models.pre_activation(marked, analyse(marked).site("wide"), key.detectors[0].trigger.pixels(marked))
    assert float(below.max()) < 0 < float(fired[(0, key.detectors[0].channel, *key.position)])
    assert verify(marked, key).stained


def test_a_batch_norm_behind_a_pixel_shuffle_is_not_the_layers_own() -> None:
    """Its channels are not the layer's channels."""
    target = Target(models.seeded(lambda: SuperResolution(norm=True)).eval(), (3, 16, 16))
    site = analyse(target).site("wide")
    assert site.norm is None
    assert site.problem is not None


@pytest.mark.parametrize(("layer", "off"), [(nn.PixelShuffle(2), 1e-9), (nn.PixelUnshuffle(2), 0.5)])
def test_moments_of_shuffled_maps_are_those_of_their_values(layer: nn.Module, off: float) -> None:
    """An unshuffled channel has a quarter of the positions, so its moments differ a little by chance."""
    maps = torch.randn(256, 8, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    maps = maps * torch.arange(1, 9).view(-1, 1, 1) + 10 * torch.arange(8).view(-1, 1, 1)
    part = trace(nn.Sequential(layer), "", (maps[:1],))[0]
    node = next(n for n in part.graph.nodes if n.op == "call_module")

    def moments(values: Tensor) -> tuple[Tensor, Tensor]:
        flat = values.transpose(0, 1).flatten(1)
        return flat.mean(1), flat.std(1, correction=0)

    found = op_of(part, node).moments([moments(maps)])
    assert found is not None
    for estimated, measured in zip(found, moments(layer(maps)), strict=True):
        assert torch.allclose(estimated, measured, atol=off, rtol=0.1 if off == 0.5 else 1e-9)
