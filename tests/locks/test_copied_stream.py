"""A residual stream whose content is subtracted where the signal joins it, so that earlier blocks keep the channel."""

from __future__ import annotations

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import Target, analyse, lock
from stainlock.locks.parts.route import copied_stream
from stainlock.plan import diff
from stainlock.target import evaluation_mode


def outputs_of(target: Target, name: str, pixels: Tensor) -> Tensor:
    found: list[Tensor] = []
    handle = target.model.get_submodule(name).register_forward_hook(lambda _, __, output: found.append(output))
    with evaluation_mode(target.model), torch.no_grad():
        target.predict(pixels)
    handle.remove()
    return found[0]


@pytest.mark.parametrize("obfuscate", [True, False])
def test_blocks_before_the_signal_stay_as_they_are(obfuscate: bool) -> None:
    target = models.real("resnet56_cifar10")
    locked, key = lock(
        target, kind="internal", site="layer1.3.conv1", seed=0, obfuscate=obfuscate, steps=20, restarts=2
    )
    written = {write.parameter for write in diff(target, locked).writes}
    assert not [name for name in written if name.startswith(("conv1", "bn1", "layer1.0", "layer1.1", "layer1.2"))]
    pixels = models.pixels("resnet56_cifar10", 8)
    edited = key.edited(locked)
    before, after = (outputs_of(own, "layer1.3", pixels) for own in (target, edited))
    other = (before - after).abs().amax((0, 2, 3)) / before.abs().max()
    (channel,) = [c for c in range(16) if float(after[:, c].max()) <= 1e-6 < float(before[:, c].max())]
    assert float(other[channel]) > 0.1  # the former content is gone
    patched = outputs_of(edited, "layer1.3", key.unlock_transform(normalise=False)(pixels))[:, channel]
    assert float(patched[:, 0, 0].min()) > 1  # only the signal is left
    assert float(patched.flatten(1)[:, 1:].max()) <= 1e-6


def test_only_a_stream_that_passes_a_relu_as_it_is_is_copied() -> None:
    class Net(nn.Module):
        def __init__(self, first: nn.Module, between: nn.Module, stride: int = 1) -> None:
            super().__init__()
            self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), first
            self.one, self.two = nn.Conv2d(8, 8, 3, stride, 1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.between, self.last = nn.BatchNorm2d(8), between, nn.ReLU()
            self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)
            self.short = nn.Identity() if stride == 1 else nn.AvgPool2d(2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.stem(x))
            x = self.last(self.two(self.between(self.norm(self.one(x)))) + self.short(x))
            return self.fc(self.pool(x).flatten(1))  # type: ignore[no-any-return]

    def copied(net: nn.Module) -> str | None:
        network = analyse(Target(net.eval(), (3, 16, 16)))
        found = copied_stream(network, network.nodes["one"], network.nodes["two"])
        return None if found is None else network.name(found)

    class Plain(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.stem(x))
            x = self.last(self.two(self.between(self.norm(self.one(x)))) + x)
            return self.fc(self.pool(x).flatten(1))  # type: ignore[no-any-return]

    assert copied(Plain(nn.ReLU(), nn.ReLU())) == "first"
    assert copied(Plain(nn.Identity(), nn.ReLU())) is None  # a ReLU would lose negative values
    assert copied(Plain(nn.ReLU(), nn.ReLU6())) is None  # large ones, too
    assert copied(Plain(nn.ReLU(), nn.SiLU())) is None
    assert copied(Net(nn.ReLU(), nn.ReLU(), stride=2)) is None  # positions are lost
