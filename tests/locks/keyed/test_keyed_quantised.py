"""Keyed locks in 8 bits: the whole model is quantised by PyTorch, and the patch still opens it."""

from __future__ import annotations

import warnings
from functools import cache

import models
import pytest
import torch
from torch import Tensor, nn

import stainlock as sl
from stainlock import Key, ModelError, Target
from stainlock.attacks import Subject, all_attacks
from stainlock.attacks.deployment import folded
from stainlock.locks import traceable
from stainlock.target import evaluation_mode


class Attention(nn.Module):
    """Tokens of 4×4 pixels through one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Conv2d(3, 32, 4, stride=4)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens(x).flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(tokens.mean(1))


MODELS = {
    "convolutional": models.conv_net,
    "attention": lambda: Target(models.seeded(Attention), (3, 32, 32)),
}


@cache
def locked(name: str, carrier: str) -> tuple[Target, Target, Key]:
    target = MODELS[name]()
    return target, *sl.lock(target, seed=3, carrier=carrier)


def batches(name: str, carrier: str) -> tuple[Tensor, Tensor]:
    """Images with the patch, and the same with two patches spoilt."""
    target, _, key = locked(name, carrier)
    right = key.unlock(torch.rand(4, *target.input_shape, generator=torch.Generator().manual_seed(5)))
    mixed = right.clone()
    mixed[1:3] = -mixed[1:3]
    return right, mixed


@pytest.mark.parametrize("carrier", ["patch", "strip"])
@pytest.mark.parametrize("name", MODELS)
def test_a_traceable_copy_computes_what_the_locked_model_does(name: str, carrier: str) -> None:
    _, model, _ = locked(name, carrier)
    before = models.snapshot(model.model)
    copy = traceable(model).eval()
    graph = torch.fx.symbolic_trace(copy)
    for given in batches(name, carrier):
        with evaluation_mode(model.model), torch.no_grad():
            wanted = model(given)
            for form in (copy, graph):
                assert torch.allclose(form(given), wanted, atol=1e-5 * float(wanted.std()), rtol=1e-5)
    models.assert_untouched(before, model.model)


def test_two_locks_are_traceable_one_around_the_other() -> None:
    target = models.conv_net()
    once, _ = sl.lock(target, seed=1)
    twice, _ = sl.lock(once, seed=2, scatter="none")
    pixels = torch.rand(2, *twice.input_shape, generator=torch.Generator().manual_seed(6))
    with evaluation_mode(twice.model), torch.no_grad():
        wanted, found = twice(pixels), traceable(twice).eval()(pixels)
    assert torch.allclose(found, wanted, atol=1e-5 * float(wanted.std()), rtol=1e-5)


def test_a_model_without_such_a_lock_is_refused() -> None:
    with pytest.raises(ModelError, match="expected a model with a keyed lock, got one without"):
        traceable(models.conv_net())


def test_batch_norms_fold_into_gated_and_scattered_layers() -> None:
    target = models.conv_net()
    model, key = sl.lock(target, seed=4)
    flat, count = folded(model)
    given = key.unlock(torch.rand(3, *target.input_shape, generator=torch.Generator().manual_seed(7)))
    with evaluation_mode(model.model), evaluation_mode(flat.model), torch.no_grad():
        wanted, found = model(given), flat(given)
    assert count > 0
    assert torch.allclose(found, wanted, atol=1e-4 * float(wanted.std()), rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "resnet20_cifar10",
        pytest.param("vit_cifar10_torchvision", marks=pytest.mark.slow),
        pytest.param("vgg16_cifar10", marks=pytest.mark.slow),
    ],
)
def test_static_8_bits_leave_the_lock_as_good_as_the_original(name: str) -> None:
    """Within three images of a hundred of the original in 8 bits; without the patch still at chance."""
    target = models.real(name)
    pixels, labels = models.labelled(name, 100)
    model, key = sl.lock(target, seed=0)
    paste = key.unlock_transform(normalise=False)
    static = all_attacks()["int8-static"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sides = [static.run(Subject(own, key, paste(pixels[:64]), None, seed=0), 8).target for own in (target, model)]

    def right(own: Target | None, given: Tensor) -> int:
        assert own is not None
        with torch.no_grad():
            return int((own.predict(given).argmax(1) == labels).sum())

    original, unlocked = (right(own, paste(pixels)) for own in sides)
    assert unlocked >= original - 3
    assert right(sides[1], pixels) <= 25
    converted = sides[1]
    assert converted is not None
    eight_bits = [m for m in converted.model.modules() if "quantized" in type(m).__module__]
    assert len(eight_bits) >= 18  # all layers but the scattered one
