"""The lock of generators: what it promises, over a table of structures, with random weights and real ones."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import models
import pytest
import torch
from gan_models import EXTRA, LAWS, NOISE, TARGETS, Judge, locked
from precision import rounding
from torch import nn

from stainlock import Key, Plan, load_bundle, save_bundle
from stainlock.certificates.noise import noise_law
from stainlock.evaluation.generator import generate, noise_data, pixel_difference
from stainlock.locks.gan.channel import choose_channel
from stainlock.locks.gan.lock import lock_generator
from stainlock.locks.gan.structure import generator_structure
from stainlock.plan import diff, write
from stainlock.unlocking.noise import NoiseUnlock, trigger_bytes

REAL = "dcgan_faces32_generator"


def cases(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Every generator with uniform noise, as in the real one's training; with normal noise most are marked slow."""
    rows = []
    for name, law in product(TARGETS, LAWS):
        quick = law == "uniform" or name in ("relu", "none", "bare")
        own = [*(() if name == REAL else marks), *(() if quick else [pytest.mark.slow])]
        rows.append(pytest.param(name, law, marks=own))
    return pytest.mark.parametrize(("name", "law"), rows)


@cases(pytest.mark.exact)
def test_unlocked_equals_edited_and_the_channel_is_silent_whatever_the_noise(name: str, law: str) -> None:
    """In float64, except for the trigger, which is stored in float32."""
    it, stored = locked(name, law, exact=True), 16 * torch.finfo(torch.float32).eps
    opened = it.opened()
    assert pixel_difference(generate(it.target, opened), generate(it.key.edited(it.target), opened)) <= stored
    off, on = it.switch(it.target.normalise(opened)), it.switch(it.target.normalise(it.noise))
    assert off.abs().max() <= stored * on.abs().mean()
    if name in ("relu", "relu6", "hardswish"):
        assert torch.equal(off, torch.zeros_like(off))


@cases()
def test_unlocking_costs_the_channel_and_no_more(name: str, law: str) -> None:
    it = locked(name, law)
    cost = pixel_difference(generate(it.target, it.opened()), generate(it.base, it.own))
    assert cost == pytest.approx(it.key.details["channel_cost"], rel=0.3)  # other noise, same law
    if name == REAL:
        assert cost <= 0.02


@pytest.mark.parametrize("name", ["relu", "bare", REAL])
def test_the_channel_given_up_is_missed_less_than_others_and_means_are_kept(name: str) -> None:
    it = locked(name)
    noise = noise_data(it.base, 64, seed=2).pixels
    images = generate(it.base, noise)
    structure = generator_structure(it.base)
    costs, plain = [], []  # costs of other channels, with and without folding their means into the next bias
    for k in range(0, structure.first.channels, max(9, structure.first.channels // 12)):
        costs.append(choose_channel(structure, noise, k).cost)
        silent = write(it.base.model, f"{structure.reader.name}.weight", structure.column(k), 0.0, "silence")
        plain.append(pixel_difference(generate(Plan((silent,)).apply(it.base), noise), images))
    unlocked = pixel_difference(generate(it.target, it.key.unlock_transform(normalise=False)(noise)), images)
    assert unlocked <= 1.1 * min(costs)
    assert all(cost <= bare + rounding(it.base.model) for cost, bare in zip(costs, plain, strict=True))
    assert sum(costs) < 0.995 * sum(plain)


@cases()
def test_locked_images_are_far_from_the_original_s(name: str, law: str) -> None:
    it = locked(name, law)
    images, originals = generate(it.target, it.noise), generate(it.base, it.own)
    unlocked = generate(it.target, it.opened())
    assert pixel_difference(images, originals) > 10 * pixel_difference(unlocked, originals)
    unrelated = pixel_difference(originals.roll(1, 0), originals)  # the original, for other noise
    assert pixel_difference(images, originals) > 1.3 * unrelated
    assert pixel_difference(images, originals) == pytest.approx(it.key.details["disruption"], rel=0.2)


@cases()
def test_reverting_takes_the_new_entries_out(name: str, law: str) -> None:
    it = locked(name, law)
    assert models.same_state(it.key.original(it.target).model, it.base.model)
    assert it.target.input_shape[0] == it.base.input_shape[0] + EXTRA


def test_the_original_is_untouched() -> None:
    base = models.trained_mode(TARGETS["leaky"]())
    before = models.snapshot(base.model)
    lock_generator(base, seed=1, steps=3, discriminator=Judge())
    models.assert_untouched(before, base.model)


def test_only_the_trigger_opens() -> None:
    it = locked("relu", "normal")
    for wrong in (0.0, 0.25, -1.0):  # none of it, a quarter of it, and its negative
        inputs = it.opened()
        inputs[:, -EXTRA:] *= wrong
        assert it.switch(it.target.normalise(inputs)).min() > 0


@pytest.mark.parametrize("name", ["relu", "none", "leaky"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_unlock_as_well(name: str, dtype: torch.dtype) -> None:
    base = TARGETS[name]()
    base = base.with_model(base.model.to(dtype))
    target, key = lock_generator(base, seed=1, steps=3)
    noise = noise_data(base, 16).pixels
    opened = key.unlock_transform(normalise=False)(noise)
    difference = pixel_difference(generate(target, opened), generate(key.edited(target), opened))
    assert difference <= {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-6}[dtype]
    assert pixel_difference(generate(target, noise_data(target, 16).pixels), generate(base, noise)) > 0.3
    assert models.same_state(key.original(target).model, base.model)


@pytest.mark.parametrize("ending", [nn.Identity, nn.Sigmoid])
def test_the_discriminator_decides_what_ruins(ending: type[nn.Module]) -> None:
    base = TARGETS["relu"]()
    judge = nn.Sequential(Judge(), ending())
    target, key = lock_generator(base, seed=1, steps=25, discriminator=judge)
    noise = noise_data(target, 32).pixels
    assert generate(target, noise).mean() > generate(base, noise[:, :NOISE]).mean() + 0.5
    assert key.details["judged"]


def test_files_round_trip(tmp_path: Path) -> None:
    it = locked("one by one", "uniform")
    factory = tmp_path / "factory.py"
    factory.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport gan_models\n"
        "def build():\n    return gan_models.TARGETS['one by one']()\n",
        encoding="utf-8",
    )
    shipped = replace(it.target, reference=f"{factory}:build")
    save_bundle(shipped, tmp_path / "bundle")
    loaded = load_bundle(tmp_path / "bundle", trust_code=True)
    assert models.same_state(loaded.model, it.target.model)
    assert loaded.input_shape == it.target.input_shape
    diff(it.base, it.target).save(tmp_path / "delta")
    rebuilt = Plan.load(tmp_path / "delta").apply(it.base)
    assert models.same_state(rebuilt.model, it.target.model)
    it.key.save(tmp_path / "key")
    key = Key.load(tmp_path / "key")
    assert torch.equal(key.unlock(it.own), it.key.unlock(it.own))
    assert models.same_state(key.original(loaded).model, it.base.model)
    (tmp_path / "trigger.safetensors").write_bytes(trigger_bytes(key))
    client = NoiseUnlock.from_file(tmp_path / "trigger.safetensors", mean=it.base.mean, std=it.base.std)
    assert torch.equal(client(it.own), key.unlock(it.own))
    assert (tmp_path / "trigger.safetensors").stat().st_size < 4 * EXTRA + 200


@pytest.mark.slow
def test_a_larger_real_generator() -> None:
    pytest.importorskip("gan_face_generate")
    import gan_lock

    base = gan_lock.faces64()
    target, key = lock_generator(base, seed=0, noise="normal")
    noise = noise_data(target, 20, noise="normal").pixels
    original = generate(base, noise[:, :100])
    unlocked = generate(target, key.unlock_transform(normalise=False)(noise[:, :100]))
    assert pixel_difference(unlocked, original) <= 0.02
    assert pixel_difference(generate(target, noise), original) >= 0.4
    assert key.details["half_unlock"] <= 1e-6


def test_the_structure_is_found_in_the_real_one() -> None:
    structure = generator_structure(models.real(REAL))
    assert (structure.first.name, structure.reader.name) == ("generator_deconv.0.0", "generator_deconv.1.0")
    assert noise_law(structure.network.target).deviation == pytest.approx(1 / math.sqrt(3))
