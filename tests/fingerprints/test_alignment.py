"""Alignment: a real model's copy, written in other ways, is still traced to its client."""

from __future__ import annotations

from functools import cache
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from stainlock import Target, lock
from stainlock.attacks import Subject, all_attacks
from stainlock.fingerprints import Layout, align, fingerprint_plan, read, trace

pytest.importorskip("cryptography")

NAME = "resnet20_cifar10"
LEAKER = 5


def secret(number: int) -> bytes:
    return number.to_bytes(32, "big")


def base() -> Target:
    return models.real(NAME)


@cache
def layout() -> Layout:
    return Layout.of(base().model, bytes(range(32)))


@cache
def copy() -> Target:
    return fingerprint_plan(base(), layout(), secret(LEAKER)).apply(base())


def traced(suspect: dict[str, Any]) -> tuple[float, float]:
    """The leaker's score, and the fraction of weights that were compared; nobody else may be named."""
    weights = {name: base().model.state_dict()[name] for name in layout().shapes}
    reading = read(align(suspect, weights).weights, weights, layout())
    found = trace(reading, map(secret, range(100)))
    assert [accused.client for accused in found.accused] == [LEAKER]
    return found.accused[0].z, reading.compared / reading.carrying


@pytest.mark.parametrize(
    ("attack", "strength"),
    [("permute-channels", 1.0), ("rescale-channels", 1.0), ("dummy-neurons", 0.5), ("fold-batch-norm", 1),
     ("int8-dynamic", 8), ("bf16", 16)],
)  # fmt: skip
def test_the_leaker_is_named_after(attack: str, strength: float) -> None:
    subject: Any = Subject(copy(), None, models.pixels(NAME, 8), seed=3)
    left = all_attacks()[attack].run(subject, strength).target
    assert left is not None
    z, compared = traced(left.model.state_dict())
    assert z > 100
    assert compared > 0.95


@pytest.mark.parametrize("pruned", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("rescaled", [False, True])
def test_pruned_weights_say_nothing_of_gains(pruned: float, rescaled: bool) -> None:
    """If zeros counted, fitted gains of rows and columns would be below 1, and remaining weights would seem changed."""
    subject: Any = Subject(copy(), None)
    left = all_attacks()["prune-unstructured"].run(subject, pruned).target
    assert left is not None
    state = dict(left.model.state_dict())
    if rescaled:
        generator = torch.Generator().manual_seed(0)
        for name in layout().shapes:
            gains = 0.5 + torch.rand(len(state[name]), generator=generator)
            state[name] = state[name] * gains.view(-1, *(1,) * (state[name].dim() - 1))
    assert traced(state)[0] > {0.5: 120, 0.7: 110, 0.9: 85}[pruned]


def test_the_leaker_is_named_in_a_locked_copy_without_its_key() -> None:
    locked, _ = lock(copy(), seed=0)
    z, compared = traced(locked.model.state_dict())
    assert z > 100
    assert compared > 0.95


def test_permuted_and_rescaled_at_once() -> None:
    given = copy()
    for attack in ("permute-channels", "rescale-channels", "fold-batch-norm"):
        subject: Any = Subject(given, None, seed=4)
        given = all_attacks()[attack].run(subject, 1.0).target
    z, compared = traced(given.model.state_dict())
    assert z > 100
    assert compared > 0.9


def test_tensors_may_be_renamed_turned_and_missing() -> None:
    state = {name: t for name, t in copy().model.state_dict().items() if name in layout().shapes}
    renamed = {f"model.w{i}": t for i, t in enumerate(reversed(list(state.values())))}
    assert traced(renamed)[0] > 100
    part = {f"backbone.{name}": t for name, t in state.items() if name.startswith(("layer2", "conv1"))}
    z, compared = traced(part)
    assert z > 50
    assert compared < 0.4


def test_a_matrix_may_lie_on_its_side() -> None:
    ours = {"w": torch.randn(20, 30, generator=torch.Generator().manual_seed(0))}
    theirs = ours["w"] + 0.01
    found = align({"MatMul_3": theirs.T.contiguous()}, ours)
    assert torch.equal(found.weights["w"], theirs)
    assert found.changed == {"w": "found as MatMul_3"}


def test_a_removed_row_is_missing_and_the_rest_is_there() -> None:
    random = torch.Generator().manual_seed(0)
    ours = {"w": torch.randn(40, 30, generator=random)}
    kept = torch.randperm(40, generator=random)[:33]
    found = align({"w": ours["w"][kept]}, ours).weights["w"]
    missing = torch.ones(40, dtype=torch.bool)
    missing[kept] = False
    assert bool(found[missing].isnan().all())
    assert torch.equal(found[kept], ours["w"][kept])


@pytest.mark.parametrize("other", ["resnet56_cifar10", "vgg16_cifar10"])
def test_another_model_is_not_aligned(other: str) -> None:
    weights: dict[str, Tensor] = {name: base().model.state_dict()[name] for name in layout().shapes}
    found = align(models.real(other).model.state_dict(), weights)
    assert found.weights == {}
    reading = read(found.weights, weights, layout())
    assert reading.compared == 0
    assert trace(reading, map(secret, range(100))).accused == ()


@pytest.mark.parametrize(("strength", "share"), [("rotate", 0.8), ("rotate-and-permute", 0.3)])
def test_a_rotated_residual_stream_is_turned_back(strength: str, share: float) -> None:
    """The model computes the same, but every channel of the stream is a mixture; reordered hidden units hide more."""
    target = models.real("vit_cifar10_torchvision")
    own = Layout.of(target.model, bytes(range(32)))
    copied = fingerprint_plan(target, own, secret(LEAKER)).apply(target)
    subject: Any = Subject(copied, None, seed=1)
    left = all_attacks()["rotate-residual"].run(subject, strength).target
    assert left is not None
    pixels = models.pixels("vit_cifar10_torchvision", 2)
    with torch.inference_mode():
        torch.testing.assert_close(left.predict(pixels), copied.predict(pixels), rtol=1e-3, atol=1e-4)
    weights = {name: target.model.state_dict()[name] for name in own.shapes}
    plain = read(left.model.state_dict(), weights, own)
    assert trace(plain, map(secret, range(100))).scores[LEAKER] < 20  # from the few weights that were not rotated
    reading = read(align(left.model.state_dict(), weights).weights, weights, own)
    found = trace(reading, map(secret, range(100)))
    assert [accused.client for accused in found.accused] == [LEAKER]
    assert found.accused[0].z > 100
    assert reading.compared > share * reading.carrying


def test_weights_may_lie_in_memory_in_any_order() -> None:
    model = copy().model
    state = {n: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for n, t in model.state_dict().items()}
    assert traced(state) == traced(dict(model.state_dict()))
