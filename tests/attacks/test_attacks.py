"""Every attack of the paper and of everyday use does what it says, and a stain of a real model is found afterwards."""

from __future__ import annotations

from functools import cache
from typing import Any

import models
import pytest
import torch
from torch import nn

import zoo
from stainlock import Key, Target, lock
from stainlock.attacks import Attacked, NotApplicable, Subject, all_attacks
from stainlock.attacks.measure import Owner, trigger_response
from stainlock.attacks.paper.saliency import rank_of
from stainlock.evaluation import Tensors
from stainlock.target import Region, evaluation_mode
from stainlock.verification import Reference, verify_response, verify_weights

NAME = "resnet20_cifar10"
FOR_FREE = ["permute-channels", "rescale-channels", "dummy-neurons", "fold-batch-norm"]
STAINED = [
    *FOR_FREE, "fp16", "bf16", "int8-dynamic", "int8-static", "perturb", "prune-unstructured", "fine-tune-last",
    "retrain-last",
]  # fmt: skip


@cache
def data() -> tuple[torch.Tensor, torch.Tensor]:
    models.real(NAME)  # or skip
    pixels, labels = zoo.natural(NAME, 120)
    assert labels is not None
    return pixels, labels


def subject(additive: bool = False, site: str | None = None, name: str = NAME) -> Subject:
    stained, key = models.stained(name, site, additive=additive)
    if name != NAME:
        return Subject(stained, key, zoo.natural(name, 2)[0])
    pixels, labels = data()
    return Subject(stained, key, pixels[:60], labels[:60], seed=3)


def accuracy(target: Target) -> float:
    pixels, labels = (part[60:] for part in data())
    with evaluation_mode(target.model), torch.inference_mode():
        return float((target.predict(pixels).argmax(1) == labels).double().mean())


@cache
def stained_accuracy(additive: bool) -> float:
    return accuracy(subject(additive).target)


@cache
def reference(additive: bool, site: str | None) -> Reference:
    given = subject(additive, site)
    return Reference.of(given.target, given.key, decoys=24)


@pytest.mark.parametrize(
    ("attack", "additive"), [*((one, False) for one in STAINED), *((one, True) for one in (*FOR_FREE, "int8-static"))]
)
def test_a_stain_is_found_after(attack: str, additive: bool) -> None:
    given = subject(additive)
    before = models.snapshot(given.target.model)
    one = all_attacks()[attack]
    strength = {"perturb": 0.1, "prune-unstructured": 0.4}.get(attack, one.strengths[-1])
    left = one.run(given, strength)
    models.assert_untouched(before, given.target.model)
    assert left.target is not None
    assert not same(given.target, left.target), "nothing was done"
    assert accuracy(left.target) >= stained_accuracy(additive) - 0.15
    assert verify_weights(left.target, given.key, reference=reference(additive, None)).p_value <= 1e-6


def same(one: Target, other: Target) -> bool:
    before, after = one.model.state_dict(), other.model.state_dict()
    return before.keys() == after.keys() and all(
        isinstance(after[k], torch.Tensor) and before[k].dtype == after[k].dtype and before[k].shape == after[k].shape
        and torch.equal(before[k], after[k]) for k in before
    )  # fmt: skip


@pytest.mark.parametrize("attack", FOR_FREE)
def test_what_a_thief_can_do_for_free_leaves_the_function(attack: str) -> None:
    given = subject()
    left = all_attacks()[attack].run(given, all_attacks()[attack].strengths[-1]).target
    assert left is not None
    pixels = data()[0][:4]
    with torch.inference_mode():
        expected, found = given.target.predict(pixels), left.predict(pixels)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("attack", ["permute-channels", "rescale-channels", "dummy-neurons"])
def test_rewriting_the_layer_before_hides_nothing_from_an_owner_with_the_model(attack: str) -> None:
    """The stained rows are permuted, rescaled or longer; matched with our model's features they are recovered."""
    given = subject(additive=True, site="layer3.2.conv2")
    left = all_attacks()[attack].run(given, 1.0 if attack != "dummy-neurons" else 0.5).target
    assert left is not None
    known = reference(True, "layer3.2.conv2")
    alone = verify_weights(left, given.key)
    if attack != "rescale-channels":  # factors change a row's direction, but not enough to hide it
        assert not alone.stained
    found = verify_weights(left, given.key, reference=known)
    assert found.p_value < 1e-50
    assert verify_response(left, given.key, reference=known).stained
    fraction = trigger_response(left, given.key, known, found)
    assert fraction == pytest.approx(1.0, abs=0.05)


def test_a_reference_finds_nothing_in_other_models() -> None:
    given = subject(additive=True, site="layer3.2.conv2")
    known = reference(True, "layer3.2.conv2")
    other, _ = models.stained(NAME, "layer3.2.conv2", additive=True, seed=2)
    for suspect in (models.real(NAME), other):
        assert verify_weights(suspect, given.key, reference=known).p_value > 1e-3
        assert verify_response(suspect, given.key, reference=known).p_value > 1e-3


@pytest.mark.parametrize("attack", ["permute-channels", pytest.param("dummy-neurons", marks=pytest.mark.slow)])
def test_rewriting_reaches_a_registry_model(attack: str) -> None:
    """EfficientNet-Lite0: with depthwise convolutions in between, and rewritten inputs of the stained layer."""
    given = subject(name="efficientnet_lite0", site="conv_head")
    left = all_attacks()[attack].run(given, 0.1)
    assert left.target is not None
    assert left.figures["layers"] >= 3
    with torch.inference_mode():
        assert given.images is not None
        found, expected = left.target.predict(given.images), given.target.predict(given.images)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert not verify_weights(left.target, given.key).stained


def test_structured_pruning_takes_whole_rows() -> None:
    given = subject()
    left = all_attacks()["prune-structured"].run(given, 0.5).target
    assert left is not None
    layer = left.model.get_submodule(given.key.site)
    assert isinstance(layer, nn.Conv2d)
    assert int((layer.weight.flatten(1).abs().sum(1) == 0).sum()) == len(layer.weight) // 2
    assert int((last := list(left.model.modules())[-1]).weight.eq(0).sum()) == 0, last


def test_the_corollary_bounds_what_is_observed() -> None:
    given = subject()
    figures = all_attacks()["perturb"].run(given, 0.03).figures
    assert 0 < figures["delta"] < 0.2
    assert figures["observed"] <= figures["bound_cap"] <= figures["bound"] <= 1
    assert figures["delta"] < all_attacks()["perturb"].run(given, 0.3).figures["delta"]


@pytest.mark.slow
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("rate", [1e-3, 1e-2])
def test_fine_tuning_all_layers_leaves_the_stain(rate: float, additive: bool) -> None:
    given = subject(additive)
    left = all_attacks()["fine-tune-all"].run(given, rate).target
    assert left is not None
    assert verify_weights(left, given.key).p_value <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["onnx", "onnx-int8-dynamic", "onnx-int8-static"])
def test_a_stain_is_found_in_onnx_files(attack: str) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    given = subject()
    left = all_attacks()[attack].run(given, 8).target
    assert left is not None
    assert accuracy(left) >= accuracy(given.target) - 0.1
    assert verify_weights(left, given.key).p_value <= 1e-6


@pytest.mark.parametrize(
    ("attack", "strength", "least", "most"),
    [("trigger-jpeg", 95, 0.3, 0.9), ("trigger-jpeg", 30, 0.0, 0.6), ("trigger-resize", 0.5, 0.0, 0.6),
     ("trigger-crop", 1, 0.1, 0.9), ("trigger-brightness", 0.9, 0.85, 1.05)],
)  # fmt: skip
def test_a_picture_on_its_way_loses_response(attack: str, strength: float, least: float, most: float) -> None:
    given = subject(site="layer2.1.conv1")
    left = all_attacks()[attack].run(given, strength)
    assert left.target is None
    owner = Owner(given.target, given.key, Tensors(data()[0][60:64]), decoys=24)
    owner.__dict__["reference"] = reference(False, "layer2.1.conv1")  # decoys once for all tests
    assert least < owner.measure(left)["trigger_response"] < most


def test_both_keys_verify_after_a_forgery() -> None:
    given = subject(additive=True, site="layer3.2.conv1")
    left = all_attacks()["forge"].run(given, "any-layer")
    assert left.target is not None
    assert left.figures["forger_log10_p"] < -100
    assert verify_weights(left.target, given.key).log10_p_value < -50
    assert "both keys verify" in left.note


def test_a_forgery_in_our_own_channel_is_told() -> None:
    """A second stain may overwrite the first: the note must say that both keys verify only if they do."""
    given = subject()
    left = all_attacks()["forge"].run(given, "same-layer")
    assert left.target is not None
    ours = verify_weights(left.target, given.key).stained
    assert ("both keys verify" in left.note) == ours


@cache
def locked() -> tuple[Target, Key]:
    found = lock(models.real(NAME), kind="internal", seed=0, steps=20, restarts=2)
    return found


def test_a_leaked_trigger_does_not_open_the_next_lock() -> None:
    target, key = locked()
    pixels, labels = data()
    given = Subject(target, key, pixels[:60], labels[:60])
    left = all_attacks()["leaked-key"].run(given, "replaced")
    owner = Owner(target, key, Tensors(pixels[60:], labels[60:]))
    assert owner.measure(Attacked())["unlocked"] > 0.7
    assert owner.measure(left)["unlocked"] < 0.3
    assert left.figures["new_trigger"] > 0.7


def test_a_rank_counts_places_and_corners() -> None:
    found = torch.zeros(6, 6)
    found[0, 0], found[0, 5], found[3, 3] = 2.0, 3.0, 9.0
    assert rank_of(found, Region((0, 0), (2, 2))) == (6, 25, 2)
    assert rank_of(found, Region((3, 3), (2, 2))) == (1, 25, 1)


def test_saliency_has_a_rank_and_a_picture() -> None:
    pytest.importorskip("captum")
    target, key = locked()
    left = all_attacks()["saliency"].run(Subject(target, key, data()[0][:3]), "gradients")
    assert 1 <= left.figures["rank"] <= left.figures["places"]
    assert left.picture is not None
    assert left.picture.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("attack", "images", "why"),
    [("fold-batch-norm", None, "no batch norm"), ("int8-static", None, "needs images"),
     ("fine-tune-all", torch.rand(2, 3, 8, 8), "needs labels"), ("trigger-jpeg", None, "needs images as inputs")],
)  # fmt: skip
def test_an_attack_that_does_not_apply_says_why(attack: str, images: Any, why: str) -> None:
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    target = Target(models.seeded(lambda: net), (32,), mean=(0,), std=(1,), bounds=(-1, 1))
    _, key = models.stained(NAME)
    with pytest.raises(NotApplicable, match=why):
        all_attacks()[attack].run(Subject(target, key, images), 1)
