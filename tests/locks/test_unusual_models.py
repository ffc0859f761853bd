"""Models with tokens among their maps, and with slices of channels: the paper's locks lock them or say why not."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import StainlockError, Target, lock
from stainlock.target import evaluation_mode, synthetic_inputs


def layer(given: int, gives: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(given, gives, 3, stride, 1, bias=False), nn.BatchNorm2d(gives), nn.ReLU())


class Attended(nn.Module):
    """Self-attention over the positions of a map, as XCiT, SwiftFormer and VOLO have it: 64 tokens of 32 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, -1)
        tokens = tokens + self.out(torch.softmax(q @ k.transpose(1, 2) / 6, -1) @ v)
        tokens = tokens + self.mlp(tokens)
        return tokens.transpose(1, 2).reshape(x.shape)


class PartlyAdded(nn.Module):
    """A shortcut that is added to only some of the channels, as in ReXNet."""

    def __init__(self, given: int, gives: int) -> None:
        super().__init__()
        self.body, self.given = layer(given, gives), given

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return torch.cat([y[:, 0 : self.given] + x, y[:, self.given :]], dim=1)


def network(*inside: nn.Module, width: int = 32) -> nn.Module:
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return models.settle(nn.Sequential(layer(3, 32, 2), layer(32, 32, 2), *inside, *head), negative=0)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tokens": lambda: network(Attended(), layer(32, 32)),
    "slices of channels": lambda: network(PartlyAdded(32, 40), layer(40, 48), width=48),
}


REFUSED = {
    ("tokens", "internal"): "no site of this model can hold this lock",
    ("slices of channels", "internal"): "getitem.*choose a site after it",
    ("slices of channels", "squeeze-excite"): "getitem.*choose a site after it",
}


@pytest.mark.parametrize("kind", ["squeeze-excite", "internal", "keyed"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_locked_or_refused_with_a_reason(name: str, kind: str) -> None:
    target = Target(models.seeded(MODELS[name]), (3, 32, 32), **models.UNIT)
    if reason := REFUSED.get((name, kind)):
        with pytest.raises(StainlockError, match=reason):
            lock(target, kind=kind, seed=0)
        return
    locked, key = lock(target, kind=kind, seed=0)
    pixels = synthetic_inputs(target, 3, torch.Generator().manual_seed(4))
    edited = target if kind == "keyed" else key.edited(locked)
    with evaluation_mode(locked.model), evaluation_mode(edited.model), torch.no_grad():
        wanted, opened = edited(key.unlock(pixels)), locked(key.unlock(pixels))
        plain, shut = edited(edited.normalise(pixels)), locked(locked.normalise(pixels))
    assert float((opened - wanted).abs().max() / wanted.std()) <= 1e-3
    assert float((shut - plain).abs().max() / plain.std()) > 0.1
