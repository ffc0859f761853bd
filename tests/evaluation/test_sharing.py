"""Exact sharing: the same bits as the plain loop, image by image, with fewer runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock import Key, ModelError, Target, lock, stain
from stainlock.errors import FileError
from stainlock.evaluation import Tensors, evaluate
from stainlock.evaluation.sharing import outputs as sharing
from stainlock.evaluation.sharing import shared_evaluations, shared_outputs, shared_predictions
from stainlock.target import evaluation_mode

BATCH, BATCHES = 4, 4
COUNT = 3


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for every run of the part after the cut."""
    found: list[str] = []
    run = sharing.Sharing._run

    def counted(self: sharing.Sharing) -> Any:
        found.append("run")
        return run(self)

    monkeypatch.setattr(sharing.Sharing, "_run", counted)
    return found


def stains(target: Target, site: str | None, **options: Any) -> list[tuple[Target, Key]]:
    return [stain(target, site=site, seed=seed, steps=12, **options) for seed in range(COUNT)]


def natural(target: Target, count: int = BATCH * BATCHES, seed: int = 0) -> Tensor:
    low, high = target.bounds
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(count, *target.input_shape, generator=generator)


def with_triggers(target: Target, made: list[tuple[Target, Key]]) -> Tensor:
    """Inputs on which every detector fires somewhere: each trigger is in a batch of its own."""
    pixels = natural(target)
    for number, (_, key) in enumerate(made):
        pixels[number * BATCH] = key.detectors[0].trigger.pixels(target)[0]
    return pixels


def plain_loop(targets: list[Target], pixels: Tensor) -> list[list[Any]]:
    """Batch by batch the outputs of each model, run whole."""
    found = []
    for batch in pixels.split(BATCH):
        found.append([])
        for target in targets:
            with evaluation_mode(target.model), torch.no_grad():
                found[-1].append(target.run_traced(batch))
    return found


def assert_shared_exactly(original: Target, others: list[Target], pixels: Tensor) -> None:
    shared = [outputs for outputs, _ in shared_outputs(original, others, Tensors(pixels), batch_size=BATCH)]
    plain = plain_loop([original, *others], pixels)
    for ours, theirs in zip(shared, plain, strict=True):
        for mine, expected in zip(ours, theirs, strict=True):
            assert models.same_bits(mine, expected)


ACTIVATIONS: list[Callable[[], nn.Module]] = [nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Hardswish, nn.LeakyReLU]
MODELS: dict[str, tuple[Callable[[], Target], str]] = {
    **{f"conv_{a.__name__}": (partial(models.conv_net, a), "conv") for a in ACTIVATIONS},
    "inplace": (partial(models.conv_net, partial(nn.ReLU, inplace=True)), "conv"),
    "no_norm": (partial(models.conv_net, norm=False), "conv"),
    "grouped": (partial(models.conv_net, groups=4), "conv"),
    "mlp": (models.mlp, "fc"),
    "mlp_norm": (partial(models.mlp, norm=True), "fc"),
    "transposed": (models.transposed_net, "deconv"),
    "encoder": (models.encoder_net, "encoder.layers.0.linear1"),
    "encoder_gelu": (partial(models.encoder_net, activation="gelu"), "encoder.layers.1.linear1"),
    "resnet20": (partial(models.real, "resnet20_cifar10"), "layer2.1.conv1"),
    "vit": (partial(models.real, "vit_cifar10_torchvision"), "encoder.layers.encoder_layer_2.mlp.0"),
}


@cache
@models.analysed_once()
def made_of(name: str, additive: bool) -> tuple[Target, list[tuple[Target, Key]]]:
    """A model of the table and its stained copies, shared: tests must not change them."""
    build, site = MODELS[name]
    target = build()
    return target, stains(target, site, additive=additive)


@pytest.mark.parametrize(
    ("name", "additive"),
    [
        pytest.param(name, additive, id=f"{name}-{'additive' if additive else 'replacing'}",
                     marks=pytest.mark.slow if name == "vit" and additive else ())
        for name in MODELS for additive in (False, True)
    ],
)  # fmt: skip
@models.analysed_once()
def test_outputs_have_the_bits_of_the_plain_loop_whether_detectors_fire_or_not(name: str, additive: bool) -> None:
    target, made = made_of(name, additive)
    before = models.snapshot(target.model)
    assert_shared_exactly(target, [stained for stained, _ in made], with_triggers(target, made))
    models.assert_untouched(before, target.model)


@pytest.mark.parametrize(
    "name", ["conv_ReLU", "conv_ReLU6", "inplace", "no_norm", "mlp", "transposed", "encoder", "resnet20"]
)
@models.analysed_once()
def test_silent_stains_of_a_channel_cost_one_run(name: str, runs: list[str]) -> None:
    target, made = made_of(name, additive=False)
    assert len({key.detectors[0].channel for _, key in made}) == 1
    others = [stained for stained, _ in made]
    data = Tensors(natural(target))
    list(shared_outputs(target, others, data, batch_size=BATCH, include_original=False))
    assert len(runs) == BATCHES
    runs.clear()
    fired = Tensors(with_triggers(target, made))
    list(shared_outputs(target, others, fired, batch_size=BATCH, include_original=False))
    # A model whose detector fires gets its own run in that batch; a trigger may excite other detectors, too.
    assert BATCHES + COUNT <= len(runs) < BATCHES * COUNT


def test_additive_stains_that_change_nothing_share_the_originals_run(runs: list[str]) -> None:
    target = models.conv_net()
    pixels = natural(target)
    other = target.copy()
    with torch.no_grad():  # a channel that is off whatever the image, before and after
        for model in (target.model, other.model):
            model.norm.bias[3] = -100.0  # type: ignore[union-attr,operator,index]
        other.model.conv.weight[3] += 0.01  # type: ignore[union-attr,operator,index]
    assert_shared_exactly(target, [other], pixels)
    assert len(runs) == BATCHES


@pytest.mark.parametrize(
    ("name", "site", "schema"),
    [
        ("resnet20_cifar10", "layer3.1.conv1", {"schema": "output", "count": 3}),
        ("vgg16_cifar10", "features.10", {"schema": "activation", "message": "a"}),
        pytest.param("vgg16_cifar10", "features.24", {"schema": "output", "count": 3}, marks=pytest.mark.slow),
    ],
)
@models.analysed_once()
def test_stains_of_several_channels(name: str, site: str, schema: dict[str, Any]) -> None:
    target = models.real(name)
    made = [stain(target, site=site, seed=seed, steps=12, **schema)[0] for seed in range(2)]
    assert_shared_exactly(target, made, models.pixels(name, BATCH))


class Twice(nn.Module):
    """There is a module between the layer and its norm; with ``again`` another layer uses the norm too."""

    def __init__(self, between: nn.Module, *, again: bool) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 16, 3), nn.Conv2d(3, 16, 3)
        self.between, self.norm = between, nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 10)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.between(self.conv(x))))
        if self.again:
            y = y + F.relu(self.norm(self.other(x)))
        return self.head(y.mean((2, 3)))


@pytest.mark.parametrize("again", [False, True], ids=["own norm", "shared norm"])
@pytest.mark.parametrize("between", [nn.Identity, nn.Dropout, nn.Softshrink])
def test_edits_that_differ_in_the_norm_alone_are_told_apart(between: type[nn.Module], again: bool) -> None:
    target = Target(models.seeded(lambda: Twice(between(), again=again)), (3, 16, 16), **models.UNIT)
    others = []
    for shift in (0.5, 0.6, 0.6):
        others.append(target.copy())
        with torch.no_grad():
            others[-1].model.conv.weight[3] += 0.1  # type: ignore[union-attr,operator,index]
            others[-1].model.norm.bias[3] += shift  # type: ignore[union-attr,operator,index]
    assert_shared_exactly(target, others, natural(target))


class Residual(nn.Module):
    """The site's input is also used by a shortcut, and modified in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        x = self.stem(x)
        y = F.relu(self.conv(x))
        x = F.relu_(x)
        x += y
        return self.head(x.reshape(count, 16, -1).mean(2))


def test_what_works_in_place_behind_the_cut_spoils_nothing() -> None:
    target = Target(models.seeded(Residual), (3, 16, 16), **models.UNIT)
    made = stains(target, "conv")
    assert_shared_exactly(target, [stained for stained, _ in made], with_triggers(target, made))


class Detects(nn.Module):
    """A stand-in for an object detector: only its backbone is used."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone


def test_of_a_part_the_parts_outputs(runs: list[str]) -> None:
    whole = models.conv_net()
    target = Target(Detects(whole.model), (3, 16, 16), part="backbone", normalises=True, **models.UNIT)
    made = [stained for stained, _ in stains(target, "backbone.conv")]
    assert_shared_exactly(target, made, natural(target))
    assert len(runs) == 2 * BATCHES


@pytest.mark.parametrize("kind", ["internal", "squeeze-excite"])
@models.analysed_once()
def test_locked_and_edited_models_share_what_is_before_the_disruptor(kind: str, runs: list[str]) -> None:
    target = models.real("resnet20_cifar10")
    locked, key = lock(target, kind=kind, seed=0, steps=20, restarts=2)  # type: ignore[arg-type]
    edited = key.edited(locked)
    pixels = models.pixels("resnet20_cifar10", BATCH * BATCHES)
    assert_shared_exactly(edited, [locked], pixels)
    assert_shared_exactly(edited, [locked], key.unlock_transform(normalise=False)(pixels))
    calls: list[int] = []
    sharer = sharing.Sharing(edited, [locked])
    sharer.working.model.conv1.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr,operator]
    with evaluation_mode(sharer.working.model), torch.no_grad():
        sharer.outputs(pixels[:BATCH], include_original=True)
    assert len(calls) == 1


@models.analysed_once()
def test_evaluations_and_predictions_are_those_of_each_model() -> None:
    target = models.real("resnet20_cifar10")
    pixels = models.pixels("resnet20_cifar10", 40)
    data = Tensors(pixels, [i % 10 for i in range(40)])
    others = [stained for stained, _ in made_of("resnet20", additive=False)[1]]
    everyone = [target, *others]
    assert shared_evaluations(target, others, data) == [evaluate(one, data) for one in everyone]
    assert shared_evaluations(target, others, data, limit=10, include_original=False) == [
        evaluate(one, data, limit=10) for one in others
    ]
    found = shared_predictions(target, others, data)
    for predictions, one in zip(found, everyone, strict=True):
        with evaluation_mode(one.model), torch.no_grad():
            expected = torch.cat([one.predict(batch).argmax(1) for batch in pixels.split(32)])
        assert torch.equal(predictions, expected)


def test_only_one_of_the_others_is_in_memory() -> None:
    target = models.conv_net()
    alive: list[weakref.ref[Target]] = []

    def made() -> Iterator[Target]:
        for seed in range(COUNT):
            assert sum(one() is not None for one in alive) <= 1
            stained, _ = stain(target, site="conv", seed=seed, steps=4)
            alive.append(weakref.ref(stained))
            yield stained

    found = shared_outputs(target, made(), Tensors(natural(target, 2)))
    outputs, labels = next(found)
    assert torch.is_grad_enabled()  # the caller's setting, also between batches
    assert len(outputs) == 1 + COUNT
    assert labels is None
    assert all(one() is None for one in alive)


def test_a_model_equal_to_the_original_needs_no_run(runs: list[str]) -> None:
    target = models.conv_net()
    assert_shared_exactly(target, [target.copy(), target.copy()], natural(target))
    assert len(runs) == BATCHES


def test_bad_input_is_told() -> None:
    target = models.conv_net()
    data = Tensors(natural(target, 2))
    with pytest.raises(ModelError, match="differ in structure"):
        list(shared_outputs(target, [models.conv_net(norm=False)], data))
    with pytest.raises(FileError, match="accuracy needs labels"):
        shared_evaluations(target, [], data)
    generator = models.transposed_net()
    with pytest.raises(ModelError, match=r"classifier's logits \(images, classes\), the model returned a tensor"):
        shared_predictions(generator, [], Tensors(natural(generator, 2)))
