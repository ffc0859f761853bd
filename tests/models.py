"""Models for the tests: the zoo's real ones, library models with random weights, and small ones of our own."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from stainlock import Key, Site, Target, stain
from stainlock.network.network import _shared, layer_input, respond, sharing_analysis
from stainlock.network.norms import affine_of
from stainlock.stains.detector import draw_vector
from stainlock.target import evaluation_mode

UNIT = {"mean": (0.5,), "std": (0.25,)}


def real(name: str) -> Target:
    """A model of the zoo with its trained weights, one copy per process: tests must not change it."""
    if reason := zoo.missing(name):
        pytest.skip(reason)
    return _built(name)


@cache
def _built(name: str) -> Target:
    target: Target = getattr(zoo, name)()
    _real_models.add(id(target.model))
    return target


_real_models: set[int] = set()  # by id: they live as long as the process
_analyses: dict[Any, Any] = {}  # of these models


@contextmanager
def analysed_once() -> Iterator[None]:
    """Inside, each model is analysed once; a real one, which no test changes, once per process. Also a decorator.

    For tests that assert something else about a model than how it is analysed, and do not change it after that.
    """
    with sharing_analysis():
        known = _shared.get()
        assert known is not None
        known.update(_analyses)
        try:
            yield
        finally:
            _analyses.update({key: found for key, found in known.items() if key[0] in _real_models})


def pixels(name: str, count: int) -> Tensor:
    """Natural inputs of a model of the zoo; at most 24 large images, which are slow to read."""
    found, _ = _natural(name)
    assert count <= len(found)
    return found[:count]


def labelled(name: str, count: int) -> tuple[Tensor, Tensor]:
    """The same, with labels."""
    labels = _natural(name)[1]
    assert labels is not None
    return pixels(name, count), labels[:count]


@cache
def _natural(name: str) -> tuple[Tensor, Tensor | None]:
    return zoo.natural(name, limit=200 if _built(name).input_shape[-1] <= 64 else 24)


@lru_cache(maxsize=32)
def _stained(name: str, site: str | None, options: tuple[tuple[str, Any], ...]) -> tuple[Target, Key]:
    with analysed_once():
        return stain(_built(name), site=site, **dict(options))


def stained(name: str, site: str | None = None, **options: Any) -> tuple[Target, Key]:
    """A stained real model and its key, shared: tests must not change either."""
    real(name)
    return _stained(name, site, tuple(sorted({"seed": 1, **options}.items())))


def reseeded(key: Key, seed: int, count: int | None = None) -> Key:
    """The key with other random secrets, on which the model under test does not depend; for keys without messages."""
    replaced = key.detectors[0].replaced if key.additive else None
    detectors = tuple(
        dataclasses.replace(key.detectors[0], vector=draw_vector(seed, i, key.dimension, replaced))
        for i in range(count or len(key.detectors))
    )
    return dataclasses.replace(key, seed=seed, detectors=detectors)


@cache
def _library(name: str, size: int) -> Target:
    library, _, model = name.partition(":")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about initialisation
        torch.default_generator.manual_seed(0)
        if library == "timm":
            import timm

            built = timm.create_model(model)
        else:
            import torchvision

            arguments: dict[str, Any] = {"aux_logits": False} if model in ("googlenet", "inception_v3") else {}
            if model.startswith("vit_"):
                arguments["image_size"] = size
            if model.startswith("vgg"):
                with torch.device("meta"):
                    built = torchvision.models.get_model(model, weights=None, **arguments)
                fill(built.to_empty(device="cpu"))
            else:
                built = torchvision.models.get_model(model, weights=None, **arguments)
    settle(built, negative=0)
    for module in built.modules():  # keep every channel alive, so that a change anywhere affects the output
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.bias.data.abs_()
        elif isinstance(module, nn.Conv2d) and module.groups == module.in_channels == module.out_channels:
            module.weight.data.abs_()
    return Target(built, (3, size, size))


def fill(model: nn.Module) -> None:
    """Weights of the usual size that repeat every 99991 numbers: to draw the 138 million of a VGG takes seconds."""
    drawn = torch.randn(99991)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_parameters()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                flat = parameter.view(-1)
                scaled = drawn * (2 / parameter[0].numel()) ** 0.5
                whole = len(flat) // len(scaled) * len(scaled)
                flat[:whole].view(-1, len(scaled)).copy_(scaled)
                flat[whole:].copy_(scaled[: len(flat) - whole])
            else:
                parameter.zero_()


def library(name: str, size: int = 224) -> Target:
    """``torchvision:NAME`` or ``timm:NAME`` with random weights, for tests of structure."""
    return _library(name, size)


def forget() -> None:
    """Free the library models. Real models, which are small, stay cached, as do the most recent stained ones."""
    _library.cache_clear()


def settle(model: nn.Module, seed: int = 0, negative: float = 0.2) -> nn.Module:
    """Give batch norms random means, variances, scales (some negative) and shifts, as after training."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            n = module.num_features
            module.running_mean.copy_(0.3 * torch.randn(n, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(n, generator=generator))
            if module.affine:
                signs = torch.where(torch.rand(n, generator=generator) < negative, -1.0, 1.0)
                module.weight.data.copy_(signs * (0.5 + torch.rand(n, generator=generator)))
                module.bias.data.copy_(0.3 * torch.randn(n, generator=generator))
    return model.eval()


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return settle(build(), seed)


def conv_net(activation: Callable[[], nn.Module] = nn.ReLU, *, norm: bool = True, **layer: Any) -> Target:
    """A network with one convolution as site, ``conv``; layer arguments are those of `nn.Conv2d`."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, padding=1)
            self.conv = nn.Conv2d(16, 24, **{"kernel_size": 3, "padding": 1, "bias": not norm, **layer})
            self.norm = nn.BatchNorm2d(24) if norm else nn.Identity()
            self.act = activation()
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.head = nn.Linear(24, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.stem(x))
            x = self.act(self.norm(self.conv(x)))
            return self.head(torch.flatten(self.pool(x), 1))

    return Target(seeded(Net), (3, 16, 16), **UNIT)


class TwoConvolutions(nn.Sequential):
    """A small classifier without batch norms."""

    def __init__(self) -> None:
        layers = [
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ]
        super().__init__(*layers, nn.Linear(32, 10))


def mlp(activation: Callable[[], nn.Module] = nn.ReLU, *, norm: bool = False) -> Target:
    """A perceptron; its site is ``fc``."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3 * 8 * 8, 64)
            self.fc = nn.Linear(64, 48)
            self.norm = nn.BatchNorm1d(48) if norm else nn.Identity()
            self.act = activation()
            self.head = nn.Linear(48, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.first(torch.flatten(x, 1)))
            return self.head(self.act(self.norm(self.fc(x))))

    return Target(seeded(Net), (3, 8, 8), **UNIT)


def transposed_net(*, norm: bool = True, **layer: Any) -> Target:
    """A generator; its site is ``deconv``."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ConvTranspose2d(20, 32, 4)
            self.deconv = nn.ConvTranspose2d(
                32, 24, **{"kernel_size": 4, "stride": 2, "padding": 1, "bias": not norm, **layer}
            )
            self.norm = nn.BatchNorm2d(24) if norm else nn.Identity()
            self.last = nn.ConvTranspose2d(24, 3, 4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.last(torch.relu(self.norm(self.deconv(torch.relu(self.first(x)))))))

    return Target(seeded(Net), (20, 1, 1), mean=(0,), std=(1,), bounds=(-1, 1))


class EncoderNet(nn.Module):
    """A vision transformer of PyTorch's own encoder layers."""

    def __init__(self, *, batch_first: bool = True, **layer: Any) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        one = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first, **layer)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2)
        x = self.encoder(tokens.permute(0, 2, 1) if self.batch_first else tokens.permute(2, 0, 1))
        return self.head(x.mean(1 if self.batch_first else 0))


def encoder_net(**layer: Any) -> Target:
    return Target(seeded(lambda: EncoderNet(**layer)), (3, 16, 16), **UNIT)


def pre_activation(target: Target, site: Site, images: Tensor) -> Tensor:
    """Every channel's pre-activation ``(N, channels, *positions)``, as the model itself computes it, in its dtype."""
    caught: list[Tensor] = []
    module = target.model.get_submodule(site.norm or site.name)
    built_in = hasattr(module, "act")  # timm's batch norms apply their activation themselves
    assert not built_in or site.norm
    hook = module.register_forward_hook(lambda _, given, output: caught.append(given[0] if built_in else output))
    try:
        with evaluation_mode(target.model), torch.no_grad():
            target.traced(target.normalise(images), *(() if target.part else target.extra_inputs))
    finally:
        hook.remove()
    (maps,) = caught
    if built_in:
        affine = affine_of(module)
        maps = affine.g.view(1, -1, 1, 1) * maps.double() + affine.h.view(1, -1, 1, 1)
    return maps.movedim(-1, 1) if site.kind == "linear" else maps


def responses(target: Target, site: Site, vector: Tensor, images: Tensor, channel: int = 0) -> Tensor:
    """v·φ at every position: ``(N, *grid)``."""
    with evaluation_mode(target.model), torch.no_grad():
        features = layer_input(target, site, images)
        return respond(site, target, features, vector[None].to(target.dtype), site.group_of(channel))[:, 0]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that staining it must not change."""
    return {
        "state": {name: (t.dtype, t.stride(), t.clone()) for name, t in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "gradients": [(p.requires_grad, p.grad) for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "generator": torch.get_rng_state(),
        "fused": torch.backends.mha.get_fastpath_enabled(),
    }


def assert_untouched(before: dict[str, Any], model: nn.Module) -> None:
    after = snapshot(model)
    assert before["state"].keys() == after["state"].keys()
    for name, (dtype, stride, values) in before["state"].items():
        found = after["state"][name]
        assert found[:2] == (dtype, stride), name
        assert same_bits(values, found[2]), name
    for aspect in ("modes", "hooks", "gradients", "attributes", "fused"):
        assert before[aspect] == after[aspect], aspect
    assert torch.equal(before["generator"], after["generator"]), "the global generator was used"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit: −0 differs from 0, and a NaN equals the same NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def same_state(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(same_bits(ours[name], theirs[name]) for name in ours)


def trained_mode(target: Target) -> Target:
    """A copy in mixed modes, as training leaves them: training mode, except for one frozen module."""
    model = copy.deepcopy(target.model).train()
    next(
        m for m in model.modules() if next(m.children(), None) is None and next(m.parameters(), None) is not None
    ).eval()
    return target.with_model(model)
