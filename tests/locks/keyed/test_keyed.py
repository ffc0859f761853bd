"""Keyed locks of many kinds of models: with the patch the original, without it nothing, and reverted to the bit."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import models
import pytest
import torch
from precision import EXACT, double, rounding
from torch import Tensor, nn
from torch.nn import functional as F

import stainlock as sl
from stainlock import Key, Target
from stainlock.errors import ModelError
from stainlock.locks.keyed import Structure, file_view
from stainlock.target import evaluation_mode, synthetic_inputs, tensors_in

UNIT = {"mean": (0.5,), "std": (0.25,)}


class Shared(nn.Module):
    """One layer called twice, one whose weight is used without calling it, and two that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.twice = nn.Conv2d(32, 32, 1)
        self.functional = nn.Conv2d(32, 32, 1)
        self.tied, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.other.weight = self.tied.weight
        self.plain = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.twice(torch.relu(self.twice(torch.relu(self.stem(x))))))
        x = F.conv2d(x, self.functional.weight, self.functional.bias).mean((2, 3))
        return self.head(torch.relu(self.plain(torch.relu(self.other(torch.relu(self.tied(x)))))))


def shared() -> Target:
    return Target(models.seeded(Shared), (3, 16, 16), **UNIT)


def small_library(name: str, **options: Any) -> Target:
    import torchvision

    def build() -> nn.Module:
        return torchvision.models.get_model(name, weights=None, num_classes=10, **options)

    return Target(models.seeded(build), (3, 64, 64), **UNIT)


def swin() -> Target:
    from torchvision.models import SwinTransformer

    def build() -> nn.Module:
        return SwinTransformer(
            [2, 2], embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10
        )

    return Target(models.seeded(build), (3, 32, 32), **UNIT)


MODELS: dict[str, Callable[[], Target]] = {
    "convolutional": models.conv_net,
    "without batch norm": lambda: models.conv_net(nn.GELU, norm=False),
    "perceptron": lambda: Target(models.mlp(norm=True).model, (3, 8, 8), **UNIT),
    "encoder": models.encoder_net,
    "encoder, tokens first": lambda: models.encoder_net(batch_first=False),
    "generator": models.transposed_net,
    "swin": swin,
    "resnet18": lambda: small_library("resnet18"),
    "mobilenet": lambda: small_library("mobilenet_v3_small"),
    "densenet": lambda: small_library("densenet121"),
    "shared weights": shared,
}
CARRIERS = {"perceptron": "strip"}  # its images are smaller than a patch


@cache
def original(name: str) -> Target:
    return MODELS[name]()


@cache
def locked(name: str) -> tuple[Target, Key]:
    return sl.lock(original(name), kind="keyed", seed=7, carrier=CARRIERS.get(name))


def inputs(name: str, count: int = 2) -> Tensor:
    return synthetic_inputs(original(name), count, torch.Generator().manual_seed(3))


def run(target: Target, given: Tensor) -> Tensor:
    with evaluation_mode(target.model), torch.no_grad():
        return tensors_in(target(given))[0]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.std())


def reference(name: str, key: Key, pixels: Tensor) -> Tensor:
    """The original's output for what the locked model's network sees."""
    target = original(name)
    return run(target, key.unlock(pixels) if key.carrier == "patch" else target.normalise(pixels))


@pytest.mark.parametrize("name", MODELS)
def test_with_the_patch_it_is_the_original(name: str) -> None:
    model, key = locked(name)
    pixels = inputs(name)
    assert distance(run(model, key.unlock(pixels)), reference(name, key, pixels)) <= 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_may_hold_several_keys(name: str) -> None:
    model, key = locked(name)
    pixels = inputs(name, 3)
    opened = key.unlock(pixels)
    wrong = opened.clone()
    wrong[1] = wrong[1].flip(0 if key.carrier == "entries" else -1)  # other bits
    found, wanted = run(model, wrong), reference(name, key, pixels)
    assert distance(found[0], wanted[0]) <= 1e-4
    assert distance(found[2], wanted[2]) <= 1e-4
    assert distance(found[1], wanted[1]) > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_reverts_to_the_bit_and_leaves_the_target_as_it_was(name: str) -> None:
    target = MODELS[name]()
    before = models.snapshot(target.model)
    model, key = sl.lock(target, kind="keyed", seed=8, carrier=CARRIERS.get(name), gates="spread")
    models.assert_untouched(before, target.model)
    assert model.model.state_dict().keys() == target.model.state_dict().keys()
    back = key.original(model)
    assert models.same_state(back.model, target.model)
    assert models.snapshot(back.model)["hooks"] == before["hooks"]
    assert (back.input_shape, back.mean, back.std) == (target.input_shape, target.mean, target.std)
    assert models.same_state(file_view(model).model, model.model)


def test_a_delta_is_small_and_makes_the_locked_model() -> None:
    target, (model, _) = original("resnet18"), locked("resnet18")
    plan = sl.diff(target, model)
    assert len(plan.to_bytes()) < 0.02 * 4 * sum(p.numel() for p in target.model.parameters())
    assert models.same_state(sl.apply(target, plan).model, model.model)
    given = synthetic_inputs(target, 2, torch.Generator().manual_seed(1))
    assert torch.equal(run(sl.apply(target, plan), given), run(model, given))


def test_layers_that_share_their_weights_have_no_gates() -> None:
    model, _ = locked("shared weights")
    structure = Structure.of(model)
    assert structure is not None
    assert [(gated.layer, gated.form) for gated in structure.gates] == [
        ("plain", "order"), ("head", "order"), ("stem", "scatter"),
    ]  # fmt: skip
    for name, message in (
        ("twice", "does not call it exactly once"),
        ("functional", "does not call it exactly once"),
        ("tied", "shares its weight"),
        ("nothing", "which is no layer of it"),
    ):
        with pytest.raises(ValueError, match=message):
            sl.lock(shared(), kind="keyed", gates=[name])


def test_swin_windows_and_token_axes() -> None:
    structures = {name: Structure.of(locked(name)[0]) for name in ("encoder", "encoder, tokens first", "swin")}
    assert all(structure is not None and len(structure.gates) >= 4 for structure in structures.values())
    first = structures["encoder, tokens first"]
    assert first is not None
    assert {gated.batch for gated in first.gates if "linear" in gated.layer} == {1}


def test_one_wrong_bit_is_as_bad_as_none() -> None:
    model, key = locked("resnet18")
    structure = Structure.of(model)
    assert structure is not None
    layout, target = structure.layout, original("resnet18")
    bits = key.detectors[0].vector > 0
    pixels = inputs("resnet18", 1)
    wanted = reference("resnet18", key, pixels)
    for place in (0, 64, 127):
        wrong = bits.clone()
        wrong[place] ^= True
        unlock = sl.locks.Unlock(layout.draw(wrong, 3), mean=target.mean, std=target.std)
        assert distance(run(model, unlock(pixels)), wanted) > 0.5


def test_two_threads_and_copies() -> None:
    model, key = locked("resnet18")
    pixels = inputs("resnet18", 2)
    right = key.unlock(pixels)
    mixed = torch.cat([right[:1], model.normalise(pixels[1:])])
    model, right, mixed = double(model), right.double(), mixed.double()
    wanted = {id(given): run(model, given) for given in (right, mixed)}
    with evaluation_mode(model.model):
        found: list[tuple[Tensor, Tensor]] = []

        def work(given: Tensor) -> None:
            with torch.no_grad():
                found.extend((model(given), wanted[id(given)]) for _ in range(5))

        threads = [threading.Thread(target=work, args=(given,)) for given in (right, mixed, right, mixed)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 20
    assert all(distance(ours, theirs) <= EXACT for ours, theirs in found)
    again = model.with_model(copy.deepcopy(model.model))
    assert torch.equal(run(again, mixed), wanted[id(mixed)])


def test_state_dict_round_trip_and_replicas() -> None:
    model, key = locked("resnet18")
    given = key.unlock(inputs("resnet18"))
    blank = model.copy()
    for parameter in blank.model.parameters():
        parameter.data.zero_()
    blank.model.load_state_dict(model.model.state_dict())
    assert torch.equal(run(blank, given), run(model, given))
    replica = model.model._replicate_for_data_parallel()  # what nn.DataParallel gives each device
    assert replica._forward_pre_hooks.keys() == model.model._forward_pre_hooks.keys()


def test_gradients_flow_after_inference() -> None:
    model, key = locked("convolutional")
    given = key.unlock(inputs("convolutional"))
    with torch.inference_mode():
        model(given)
    model.model(given.requires_grad_(True)).sum().backward()
    assert given.grad is not None
    assert bool(given.grad.any())
    model.model.zero_grad()


def test_a_failed_call_leaves_nothing_behind() -> None:
    model, key = locked("convolutional")
    given = key.unlock(inputs("convolutional"))
    with pytest.raises(RuntimeError):
        model.model(torch.cat([given, given], 1))  # six channels
    with pytest.raises(ModelError, match="run the whole model"):
        model.model.conv(torch.zeros(1, 16, 8, 8))
    with pytest.raises(ValueError, match="at least the patch's 7×7 pixels"):
        model.model(given[:, :, :6])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, key = locked("resnet18")
    pixels = inputs("resnet18")
    given = key.unlock(pixels).to(dtype)
    ours, theirs = (t.with_model(copy.deepcopy(t.model).to(dtype)) for t in (model, original("resnet18")))
    wanted = reference("resnet18", key, pixels)
    lost = distance(run(theirs, given).float(), wanted)
    assert distance(run(ours, given).float(), wanted) <= 4 * lost + 0.01


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (models.conv_net, {"rounds": 10}, "expected 8, 12, 20 rounds"),
        (models.conv_net, {"gates": 99}, "a number up to"),
        (models.conv_net, {"gates": "many"}, "expected gates usual, all, spread"),
        (models.conv_net, {"scatter": "many"}, "expected scatter first, all, none or different names of layers"),
        (models.conv_net, {"scatter": ["nothing"]}, "nothing can't be scattered"),
        (lambda: small_library("mobilenet_v2"), {"gates": ["features.1.conv.0.0"]}, "it is a grouped convolution"),
        (lambda: small_library("mobilenet_v2"), {"gates": ["features.1.conv.0.1"]}, "it is a BatchNorm2d"),
    ],
)  # fmt: skip
def test_bad_options(build: Callable[[], Target], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sl.lock(build(), kind="keyed", **options)


def test_models_without_a_layer_to_gate() -> None:
    grouped = nn.Sequential(nn.Conv2d(3, 3, 3, groups=3), nn.ReLU(), nn.Flatten(), nn.Softmax(1))
    with pytest.raises(ModelError, match="no layer to gate"):
        sl.lock(Target(grouped, (3, 32, 32)), kind="keyed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and in use
        plain = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
        quantised = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
    with pytest.raises(ModelError, match="protect the model in floating point, and quantise it afterwards"):
        sl.lock(Target(quantised, (3, 32, 32)), kind="keyed")


@pytest.mark.parametrize(
    "name", ["resnet20_cifar10", pytest.param("vgg16_cifar10", marks=pytest.mark.slow), "vit_cifar10_torchvision"]
)
def test_real_weights(name: str) -> None:
    target = models.real(name)
    pixels, labels = models.labelled(name, 50)

    def accuracy(outputs: Tensor) -> float:
        return float((outputs.argmax(1) == labels).double().mean())

    plain = target.normalise(pixels)
    before = run(target, plain)
    for carrier in ("patch", "strip"):
        exact, key = sl.lock(double(target), kind="keyed", seed=5, carrier=carrier)
        opened = key.unlock(pixels[:10]).double()
        seen = opened if carrier == "patch" else plain[:10].double()
        assert distance(run(exact, opened), run(double(target), seen)) <= EXACT
        model, key = sl.lock(target, kind="keyed", seed=5, carrier=carrier)
        opened = key.unlock(pixels)
        wanted = run(target, opened) if carrier == "patch" else before
        assert float((run(model, opened) - wanted).abs().max() / wanted.abs().max()) <= rounding(target.model)
        blank = opened.clone()
        blank[..., : key.detectors[0].trigger.region.size[0], :] = 0.0
        assert accuracy(run(model, blank)) <= 0.2
        assert accuracy(run(file_view(model), plain)) <= 0.2
        assert accuracy(wanted) >= accuracy(before) - 0.05
