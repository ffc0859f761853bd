"""Small generators of every structure that can be locked, and one lock of each: what the tests of that lock share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import models
import torch
from precision import double
from torch import Tensor, nn

from stainlock import Key, Target
from stainlock.evaluation.generator import noise_data
from stainlock.locks.gan.lock import lock_generator

NOISE, EXTRA = 24, 12
BETWEEN: dict[str, Callable[[], nn.Module] | None] = {
    "relu": nn.ReLU, "leaky": lambda: nn.LeakyReLU(0.2), "none": None, "gelu": nn.GELU, "tanh": nn.Tanh,
    "relu6": nn.ReLU6, "sigmoid": nn.Sigmoid, "hardswish": nn.Hardswish,
}  # fmt: skip


def small(between: str = "relu", *, reader: str = "transposed", affine: bool = True, bias: bool = False) -> nn.Module:
    """A DC-GAN of two steps to 8×8, its batch norms told what its channels are like."""
    make = BETWEEN[between]
    second: nn.Module = nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=bias)
    last: nn.Module = nn.Conv2d(16, 3, 3, padding=1)
    if reader == "convolution":
        second, last = nn.Conv2d(32, 16, 3, padding=1, bias=bias), nn.ConvTranspose2d(16, 3, 4, 2, 1)
    norm = [] if reader == "plain" else [nn.BatchNorm2d(16)]
    first = [nn.ConvTranspose2d(NOISE, 32, 4, bias=bias), nn.BatchNorm2d(32, affine=affine)]
    model = nn.Sequential(*first, *([make()] if make else []), second, *norm, nn.LeakyReLU(0.2), last, nn.Tanh())
    noise = torch.rand(256, NOISE, 1, 1) * 2 - 1
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
                if affine:
                    module.weight.uniform_(0.5, 1.5)
                    module.bias.normal_(0, 0.3)
        model.train()(noise)
    return model.eval()


TARGETS: dict[str, Callable[[], Target]] = {
    **{name: lambda name=name: Target(small(name), (NOISE, 1, 1), (0,), (1,), (-1, 1)) for name in BETWEEN},
    "convolution": lambda: Target(small("none", reader="convolution"), (NOISE, 1, 1), (0,), (1,), (-1, 1)),
    "bare": lambda: Target(small(reader="plain", affine=False, bias=True), (NOISE, 1, 1), (0,), (1,), (-1, 1)),
    "off-centre": lambda: Target(small("leaky"), (NOISE, 1, 1), (0.1,), (2,), (0, 1)),
    "one by one": lambda: Target(small(), (NOISE, 1, 1), [0.1] * NOISE, [0.5] * NOISE, (-1, 1)),
    "dcgan_faces32_generator": lambda: models.real("dcgan_faces32_generator"),
}
LAWS = ("uniform", "normal")


@dataclass(frozen=True)
class Locked:
    base: Target
    target: Target
    key: Key
    noise: Tensor  # of the locked model's own length

    @property
    def own(self) -> Tensor:
        return self.noise[:, : self.base.input_shape[0]]

    def switch(self, inputs: Tensor) -> Tensor:
        """What the reader gets of the switch's channel."""
        caught: list[Tensor] = []

        def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            caught.append(given[0].detach()[:, self.key.detectors[0].channel])
            raise StopIteration  # the rest need not run

        handle = self.target.model.get_submodule(self.key.details["layers"][1]).register_forward_pre_hook(stop)
        with torch.inference_mode(), contextlib.suppress(StopIteration):
            self.target(inputs)
        handle.remove()
        return caught[0]

    def opened(self) -> Tensor:
        return self.key.unlock_transform(normalise=False)(self.own)


def target(name: str) -> Target:
    """The same weights whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return TARGETS[name]()


@cache
def locked(name: str, law: str = "uniform", *, exact: bool = False) -> Locked:
    """One lock a process, in float64 if it is to be exact: tests must leave it as it is.

    What is exact does not depend on how much the locked images are ruined, so few steps and little noise do for that.
    """
    base = double(target(name)) if exact else target(name)
    locked, key = lock_generator(base, seed=3, noise=law, dimensions=EXTRA, steps=2 if exact else 12)
    return Locked(base, locked, key, noise_data(locked, 16 if exact else 40, noise=law, seed=8).pixels)


class Judge(nn.Module):
    """One logit: how dark the image is."""

    def forward(self, images: Tensor) -> Tensor:
        return -images.mean((1, 2, 3))[:, None]
