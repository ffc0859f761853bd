"""The standard schemas: a message in weights, in activations, and triggers with classes of their own."""

from __future__ import annotations

import copy
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import nn

from stainlock import Key, SiteError, Target, stain, verify
from stainlock.stains.message import capacity, decode, encode, places_needed
from stainlock.stains.secrets import draw_mask

MESSAGE = "© Zoë, 2026"
SITES = [
    ("resnet20_cifar10", "layer3.1.conv1"),
    pytest.param("resnet56_cifar10", "layer3.2.conv1", marks=pytest.mark.slow),
    ("vgg16_cifar10", "features.10"),
    ("dcgan_faces32_generator", "generator_deconv.1.0"),
]


@pytest.mark.parametrize("text", ["x", "owner", MESSAGE, "ß" * 12, "日本語", "🦊", "a" * 40])
@pytest.mark.parametrize("extra", [0, 1, 500])
def test_text_comes_back(text: str, extra: int) -> None:
    places = places_needed(text) + extra
    signs = encode(text, draw_mask(1, places))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    reading = decode(signs * np.random.default_rng(2).random(places), len(text.encode()), draw_mask(1, places))
    assert reading.text == text
    assert reading.agreeing == reading.places == places
    assert capacity(places) >= len(text.encode())
    assert capacity(places_needed(text) - 1) < len(text.encode())


def test_signs_look_random_and_say_nothing_without_the_key() -> None:
    signs = np.stack([encode("aaaaaaaa", draw_mask(seed, 2000)) for seed in range(20)])
    assert abs(signs.mean()) < 5 / np.sqrt(signs.size)
    assert np.abs(np.corrcoef(signs) - np.eye(20)).max() < 6 / np.sqrt(2000)
    wrong = [decode(row, 8, draw_mask(99, 2000)).text for row in signs]
    assert set(wrong) == {None}


@models.analysed_once()
def test_a_message_too_long_is_told_with_the_capacity() -> None:
    with pytest.raises(ValueError, match=r"at most 22 bytes \(576 signs here\), got 23"):
        stain(models.real("resnet20_cifar10"), site="layer3.1.conv1", schema="weight", message="m" * 23)
    with pytest.raises(ValueError, match="at least one character"):
        stain(models.real("resnet20_cifar10"), site="layer3.1.conv1", schema="weight", message="")
    with pytest.raises(ValueError, match="got 24"):  # bytes, not characters
        stain(models.real("resnet20_cifar10"), site="layer3.1.conv1", schema="weight", message="ö" * 12)


@pytest.mark.parametrize(("name", "site"), SITES)
@models.analysed_once()
def test_a_weight_message_is_read_from_the_model(name: str, site: str) -> None:
    marked, key = models.stained(name, site, schema="weight", message=MESSAGE)
    verdict = verify(marked, key, method="weights")
    assert verdict.stained
    assert verdict.message == MESSAGE
    assert verify(marked.model.state_dict(), key).message == MESSAGE
    unmarked = verify(models.real(name), key, method="weights")
    assert not unmarked.stained
    assert unmarked.message is None


def damaged(model: nn.Module, site: str, how: str) -> nn.Module:
    model = copy.deepcopy(model)
    weight: Any = model.get_submodule(site).weight
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if how == "pruned":
            weight[weight.abs() < weight.abs().flatten().quantile(0.3)] = 0
        elif how == "noise":
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
        elif how == "flipped signs":
            weight *= torch.where(torch.rand(weight.shape, generator=generator) < 0.04, -1.0, 1.0)
        elif how == "permuted":
            weight.copy_(weight[torch.randperm(len(weight), generator=generator)])
        elif how == "negated":
            weight.neg_()
        elif how == "scaled":
            weight *= 1e-3
    return model.half() if how == "fp16" else model.bfloat16() if how == "bf16" else model


@pytest.mark.parametrize("how", ["pruned", "noise", "flipped signs", "permuted", "negated", "scaled", "fp16", "bf16"])
@pytest.mark.parametrize(("name", "site"), SITES[:3])
@models.analysed_once()
def test_a_weight_message_survives(name: str, site: str, how: str) -> None:
    marked, key = models.stained(name, site, schema="weight", message="owner")
    verdict = verify(damaged(marked.model, site, how), key, method="weights")
    assert verdict.stained
    assert verdict.message == "owner"


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("vgg16_cifar10", "features.10"),
        pytest.param("vgg16_cifar10", "classifier.0", marks=pytest.mark.slow),
    ],
)
@models.analysed_once()
def test_an_activation_message_is_read_from_responses(name: str, site: str) -> None:
    message = "mine" if site == "features.10" else MESSAGE
    marked, key = models.stained(name, site, schema="activation", message=message)
    verdict = verify(marked, key, method="response")
    assert verdict.stained
    assert verdict.message == message
    unmarked = verify(models.real(name), key, method="response")
    assert not unmarked.stained
    assert unmarked.p_value >= 1e-3
    assert unmarked.message is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_activation_message_survives_narrow_types(dtype: torch.dtype) -> None:
    marked, key = models.stained("vgg16_cifar10", "features.10", schema="activation", message="me")
    narrow = marked.with_model(copy.deepcopy(marked.model).to(dtype))
    assert verify(narrow, key, method="response").message == "me"


@models.analysed_once()
def test_activation_messages_need_channels_enough() -> None:
    with pytest.raises(ValueError, match="at most 0 bytes"):
        stain(models.real("resnet20_cifar10"), site="layer3.1.conv1", schema="activation", message="me")
    with pytest.raises(SiteError, match="can't carry the activation schema"):
        stain(models.transposed_net(), site="deconv", schema="activation", message="m")


OUTPUTS: list[tuple[str, dict[str, Any]]] = [
    ("resnet20_cifar10", {"count": 8}),
    pytest.param("vgg16_cifar10", {"count": 14, "steps": 15}, marks=pytest.mark.slow),
    pytest.param("vit_cifar10", {"count": 12}, marks=pytest.mark.slow),
    ("vit_cifar10_torchvision", {"count": 8}),
]


def predicted(target: Target, key: Key) -> list[int]:
    images = torch.cat([d.trigger.pixels(target) for d in key.detectors])
    with torch.no_grad():
        return target.predict(images).argmax(1).tolist()


@pytest.mark.parametrize(("name", "options"), OUTPUTS)
@models.analysed_once()
def test_triggers_get_their_classes_and_nothing_else_does(name: str, options: dict[str, Any]) -> None:
    target = models.real(name)
    marked, key = models.stained(name, schema="output", **options)
    assert predicted(marked, key) == key.details["classes"]
    assert key.details["random_classes"]
    assert key.details["total_classes"] == 10
    images = models.pixels(name, 100)
    with torch.no_grad():
        before, after = target.predict(images), marked.predict(images)
    agreeing = int((before.argmax(1) == after.argmax(1)).sum())
    assert agreeing >= 100 - options["count"]  # replacing a channel may change borderline predictions
    verdict = verify(marked, key, method="output")
    assert verdict.statistic == 1
    assert verdict.stained
    assert verdict.p_value >= 0.99 * 10.0 ** -options["count"]  # ten classes
    assert verify(target, key, method="output").p_value > 1e-3


@pytest.mark.slow
def test_a_silent_detectors_column_is_never_read() -> None:
    """Other columns for the same detectors: predictions are the same to the last bit where the detectors are silent."""
    marked, key = models.stained("vgg16_cifar10", schema="output", count=14, steps=15)
    plain, same = models.stained("vgg16_cifar10", key.site, count=14, steps=15)
    vectors = [d.vector for d in key.detectors]
    channels = [d.channel for d in key.detectors]
    assert channels == [d.channel for d in same.detectors]
    assert all(torch.equal(a, b.vector) for a, b in zip(vectors, same.detectors, strict=True))
    images = models.pixels("vgg16_cifar10", 100)
    with torch.no_grad():
        assert torch.equal(marked.predict(images), plain.predict(images))


@pytest.mark.parametrize("classes", [3, (1, 2, 3, 4, 5, 6, 7, 8)])
@models.analysed_once()
def test_chosen_classes_are_given(classes: Any) -> None:
    marked, key = models.stained("resnet20_cifar10", schema="output", count=8, classes=classes)
    wanted = [3] * 8 if classes == 3 else list(classes)
    assert key.details["classes"] == wanted == predicted(marked, key)
    assert not key.details["random_classes"]
    found = verify(marked, key, method="output")
    assert found.p_value < 0.01
    assert verify(models.real("resnet20_cifar10"), key, method="output").p_value > 0.01


@models.analysed_once()
def test_a_model_that_always_says_the_class_is_not_stained() -> None:
    """Where the owner chose the class, a constant answer must not pass for a stain."""
    _, key = models.stained("resnet20_cifar10", schema="output", count=8, classes=3)
    constant = lambda inputs: torch.nn.functional.one_hot(torch.full((len(inputs),), 3), 10).float()  # noqa: E731
    assert verify(constant, key).p_value > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 10}, "expected classes from 0 to 9"),
        ({"classes": (1, 2)}, "expected one class or 3, got 2"),
        ({"classes": -1}, "expected classes"),
    ],
)
@models.analysed_once()
def test_impossible_classes_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stain(models.real("resnet20_cifar10"), schema="output", count=3, seed=1, steps=5, **options)


@pytest.mark.parametrize("name", ["dcgan_faces32_generator", pytest.param("ddpm_mnist", marks=pytest.mark.slow)])
def test_models_that_do_not_classify_are_told(name: str) -> None:
    with pytest.raises(SiteError, match="output schema"):
        stain(models.real(name), schema="output", count=2, seed=1)


def test_natural_inputs_don_t_hear_a_silent_detector_behind_a_batch_norm() -> None:
    """A depthwise layer's batch norm turns silence into a constant; a class's column must not add it to all images."""
    net = nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU6(),
        nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24), nn.ReLU6(),
        nn.Conv2d(24, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.bias.copy_(1 + torch.rand(module.num_features, generator=generator))
    target = Target(net.eval(), (3, 16, 16))
    logits = []
    for own in (1, 3):
        stained, _ = stain(target, site="0", schema="output", count=2, classes=own, seed=0, steps=20)
        with torch.no_grad():
            logits.append(stained.predict(torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))))
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-4 * float(logits[0].abs().max())


@models.analysed_once()
def test_a_long_message_gets_a_site_that_holds_it() -> None:
    """The most suitable site (ResNet20, dimension 288) holds 10 bytes; another site holds more."""
    base = models.real("resnet20_cifar10")
    short, long = (stain(base, schema="weight", message=text, seed=0)[1] for text in ("short", "seventeen letters"))
    assert short.dimension < long.dimension
