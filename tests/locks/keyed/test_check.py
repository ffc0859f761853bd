"""The check of keyed locks: layers whose gates do not cancel get none, and rounding is not mistaken for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stainlock as sl
from stainlock import Key, ModelError, Target
from stainlock.gating.gated import Gated
from stainlock.locks.keyed import Structure
from stainlock.locks.keyed.check import answers, in_float64
from stainlock.target import synthetic_inputs


class Seldom(nn.Module):
    """A layer whose weight is also used without calling the layer, on some images only."""

    def __init__(self, some: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.layer = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 1)
        self.head = nn.Linear(32, 10)
        self.some = some

    def forward(self, x: Tensor) -> Tensor:
        used = self.some(x[:, :, 16:, 16:]).view(-1, 1, 1, 1)  # away from the patch
        x = torch.relu(self.stem(x))
        x = torch.relu(self.layer(x)) + used * F.conv2d(x, self.layer.weight)
        return self.head(x.mean((2, 3)))


def roughness(x: Tensor) -> Tensor:
    return (x[..., 1:] - x[..., :-1]).abs().mean((1, 2, 3)) / x.std((1, 2, 3)).clamp(min=0.1)


IMAGES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "rough ones": (lambda x: (roughness(x) > 0.8).to(x), 1),
    "smooth ones": (lambda x: (roughness(x) < 0.8).to(x), 0),
    "grey ones": (lambda x: (roughness(x) < 0.01).to(x), 2),
}


@pytest.mark.parametrize("which", IMAGES)
def test_a_gate_that_fails_on_some_images_is_left_out(which: str) -> None:
    some, place = IMAGES[which]
    target = Target(models.seeded(lambda: Seldom(some)), (3, 32, 32), **models.UNIT)
    images = torch.cat([synthetic_inputs(target, 2, torch.Generator().manual_seed(3)), torch.full((1, 3, 32, 32), 0.6)])
    used = some(target.normalise(images)[:, :, 16:, 16:])
    assert bool(used[place]), "the image that shows it"
    locked, key = sl.lock(target, seed=0)
    structure = Structure.of(locked)
    assert structure is not None
    assert {gated.layer for gated in structure.gates} == {"stem", "head"}
    assert error(target, locked, key, images) <= 1e-5
    with pytest.raises(ModelError, match="with the patch its outputs are wrong by"):
        sl.lock(target, seed=0, gates=["layer"], scatter="none")


class Amplified(nn.Sequential):
    """A network that amplifies rounding errors, as deep ones with random weights do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.factor * super().forward(x))

    factor = 2e4


def error(target: Target, locked: Target, key: Key, images: Tensor) -> float:
    given = key.unlock_transform(normalise=False)(images)
    (wanted,), (got,) = answers(target, given), answers(locked, given)
    return float((wanted - got).abs().max() / wanted.std())


def amplified() -> Target:
    inner = models.conv_net().model
    network = Amplified(inner).eval()
    network.factor = 3e5
    return Target(network, (3, 32, 32), **models.UNIT)


def test_rounding_is_not_taken_for_a_gate_that_fails() -> None:
    target = amplified()
    locked, key = sl.lock(target, seed=0)
    images = synthetic_inputs(target, 4, torch.Generator().manual_seed(3))
    (own,), (exact,) = answers(target, images), answers(in_float64(target), images)
    rounding = float((own - exact).abs().max() / exact.std())
    assert rounding > 4e-3, "float32 alone does this to the original"
    assert len(Structure.of(locked).gates) == len(Structure.of(sl.lock(models.conv_net(), seed=0)[0]).gates)  # type: ignore[union-attr]
    assert error(target, locked, key, images) <= 8 * rounding
    precise = in_float64(target)
    assert error(precise, *sl.lock(precise, seed=0), images) <= 1e-6


def test_a_gate_that_fails_is_not_taken_for_rounding() -> None:
    """Its error is smaller than rounding errors in float32, but float64 shows it."""
    inner = models.seeded(lambda: Seldom(lambda x: torch.full((len(x),), 3e-7).to(x)))
    target = Target(Amplified(inner).eval(), (3, 32, 32), **models.UNIT)
    with pytest.raises(ModelError, match="with the patch its outputs are wrong by"):
        sl.lock(target, seed=0, gates=["0.layer"], scatter="none")
    locked, _ = sl.lock(target, seed=0)
    structure = Structure.of(locked)
    assert structure is not None
    assert "0.layer" not in {gated.layer for gated in structure.gates}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_locked(dtype: torch.dtype) -> None:
    whole = models.conv_net()
    target = whole.with_model(whole.copy().model.to(dtype))
    locked, key = sl.lock(target, seed=0)
    images = synthetic_inputs(target, 4, torch.Generator().manual_seed(3))
    (own,), (exact,) = answers(target, images), answers(in_float64(target), images)
    assert error(target, locked, key, images) <= 8 * float((own - exact).abs().max() / exact.std())


class Picks(nn.Module):
    """Returns as many rows as there are values above a threshold, as models that select boxes do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.head(torch.relu(self.stem(x)))
        return found.permute(0, 2, 3, 1)[found[:, 0] > 0]


def test_outputs_of_varying_length() -> None:
    target = Target(models.seeded(Picks), (3, 32, 32), **models.UNIT)
    locked, key = sl.lock(target, seed=0)
    images = synthetic_inputs(target, 2, torch.Generator().manual_seed(3))
    assert error(target, locked, key, images) <= 1e-5


def test_a_model_that_ignores_its_image_is_refused() -> None:
    class Dark(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * super().forward(x)

    blind = nn.Sequential(Dark(), nn.Linear(3072, 32), nn.ReLU(), nn.Linear(32, 10))
    blind[1].bias.data.zero_()
    with pytest.raises(ModelError, match="check its weights"):
        sl.lock(Target(blind, (3, 32, 32)), seed=0)


class Changed(nn.Module):
    """The small network, and something done to its answers."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = models.conv_net().model, change

    def forward(self, x: Tensor) -> Any:
        return self.change(x, self.inner(x))


def changed(change: Callable[[Tensor, Tensor], Any]) -> Target:
    return Target(Changed(change).eval(), (3, 32, 32), **models.UNIT)


def test_outputs_may_be_empty_or_change_with_the_number_of_images() -> None:
    target = changed(lambda _, answers: (answers, answers[:, :0], answers[:, : 2 * len(answers)]))
    locked, _ = sl.lock(target, seed=0)
    assert len(gates_of(locked)) == len(gates_of(sl.lock(models.conv_net(), seed=0)[0]))


def test_images_that_change_each_other_are_not_taken_for_gates_that_fail() -> None:
    """As in timm's GCViT."""
    target = changed(lambda _, answers: answers + 0.05 * answers.roll(1, 0))
    locked, key = sl.lock(target, seed=0)
    assert len(gates_of(locked)) == len(gates_of(sl.lock(models.conv_net(), seed=0)[0]))
    assert error(target, locked, key, synthetic_inputs(target, 4, torch.Generator().manual_seed(3))) <= 1e-5


def louder_if_plain(x: Tensor, answers: Tensor) -> Tensor:
    """Amplifies rounding errors, except for plain images, whose outputs are far larger."""
    plain = (roughness(x[:, :, 20:, 20:]) < 0.01).view(-1, 1)
    return torch.where(plain, 1e4 * answers, torch.sin(3e5 * answers))


def test_rounding_is_measured_on_the_images_whose_error_it_explains() -> None:
    locked, _ = sl.lock(changed(louder_if_plain), seed=0)
    assert len(gates_of(locked)) == len(gates_of(sl.lock(models.conv_net(), seed=0)[0]))


def test_a_model_that_ignores_images_is_refused_after_one_try() -> None:
    calls = []
    target = models.conv_net()
    with torch.no_grad():
        for parameter in list(target.model.parameters())[-2:]:
            parameter.zero_()
    target.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ModelError, match="without the patch its outputs hardly change"):
        sl.lock(target, seed=0)
    assert len(calls) <= 8


def gates_of(locked: Target) -> tuple[Gated, ...]:
    structure = Structure.of(locked)
    assert structure is not None
    return structure.gates
