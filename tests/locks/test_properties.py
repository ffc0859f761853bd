"""What every lock promises, over the table of kinds and models in `locked`."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from locked import CASES, EXACTLY, Locked, closed, distance, lock, locked, of_kind, on_real, run, tolerance
from precision import EXACT, double, rounding

from stainlock import Key, Plan, load_bundle, save_bundle
from stainlock.plan import diff
from stainlock.target import Target

# One case per kind that is quick to lock again.
QUICK: dict[str, dict[str, Any]] = {
    "internal, resnet20_cifar10": {"steps": 4, "restarts": 2},
    "new, the paper's": {"steps": 4, "restarts": 2, "site": "layer1.1.conv1"},  # the row above chooses its site
    "vit, torchvision": {"steps": 2, "restarts": 4},
    "gan, relu": {"steps": 2},
    "keyed, convolutional": {},
}


@pytest.mark.parametrize("case", of_kind())
def test_unlocked_equals_edited(case: str) -> None:
    """The residue of noise in a conduit is measured in float64: in float32, a strong disruptor magnifies rounding a
    thousandfold, by an amount that depends on the processor's kernels."""
    it = locked(case)
    found, expected = it.unlocked_outputs, it.edited_outputs_with_patch
    if it.kind in ("internal", "squeeze-excite"):
        found, expected = (run(double(own), it.unlocked[:6].double()) for own in (it.target, it.edited))
    assert distance(found, expected) <= tolerance(it)


@pytest.mark.exact
@pytest.mark.parametrize("case", of_kind(table=EXACTLY))
def test_unlocked_equals_edited_to_rounding_in_float64(case: str) -> None:
    it = locked(case, exact=True)
    assert distance(it.unlocked_outputs, it.edited_outputs_with_patch) <= EXACT


@pytest.mark.parametrize("case", of_kind())
def test_without_the_patch_it_is_closed(case: str) -> None:
    it = locked(case)
    assert distance(it.locked_outputs, it.edited_outputs) >= 0.1
    assert closed(it, it.plain)


@pytest.mark.parametrize("case", on_real("squeeze-excite", "internal"))
def test_locked_is_at_chance(case: str) -> None:
    it = locked(case)
    pixels, labels = models.labelled(CASES[case].model, 20 if it.base.input_shape[-1] > 64 else 100)
    right = run(it.target, it.base.normalise(pixels)).argmax(1) == labels
    assert right.double().mean() <= 0.2


def wrong_patches(it: Locked) -> list[torch.Tensor]:
    """Noise, and the right patch inverted, mirrored and shifted by a pixel, unless it opens the lock anywhere."""
    levels = it.key.detectors[0].trigger.levels
    noise = torch.randint(0, 256, levels.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    moved = [] if it.key.details.get("anywhere") else [levels.roll(1, -1)]
    return [noise, 255 - levels, levels.flip(-1), *moved]


@pytest.mark.parametrize("case", of_kind("internal", "squeeze-excite", "vit", "keyed"))
def test_a_wrong_patch_does_not_unlock(case: str) -> None:
    it = locked(case)
    for patch in wrong_patches(it):
        assert closed(it, it.with_patch(patch))


# Locks that open only at one place: those of vision transformers, and those whose batch norm vetoes other places.
@pytest.mark.parametrize(
    "case", ["internal, resnet18", "internal, vgg16_cifar10", "new", *of_kind("vit"),
             *(pytest.param(case, marks=pytest.mark.slow)
               for case in ("internal, resnet56_cifar10", "internal, vgg11_bn", "new, deep"))],
)  # fmt: skip
def test_the_patch_elsewhere_does_not_unlock(case: str) -> None:
    it = locked(case)
    levels = it.key.detectors[0].trigger.levels
    height, width = levels.shape[1:]
    bottom, right = (n - k for n, k in zip(it.base.input_shape[1:], (height, width), strict=True))
    places = {(1, 1), (0, min(4, right)), (0, width), (height, 0), (0, right), (bottom, 0), (bottom, right)}
    for top, left in {*places, (bottom // 8 * 4, right // 8 * 4)} - {(0, 0)}:
        assert closed(it, it.with_patch(levels, top, left)), (top, left)


@pytest.mark.parametrize("case", ["internal, resnet20_cifar10", "vit, torchvision", "keyed, convolutional"])
def test_the_patch_of_another_seed_does_not_unlock(case: str) -> None:
    it, other = locked(case), locked(case, seed=1)
    assert it.key.site == other.key.site
    assert closed(it, other.key.unlock(it.images))


@pytest.mark.parametrize("case", of_kind())
def test_reverting_restores_every_bit(case: str) -> None:
    it = locked(case)
    back = it.key.original(it.target)
    assert back.insertions == ()
    assert (back.input_shape, back.mean, back.std) == (it.base.input_shape, it.base.mean, it.base.std)
    assert list(back.model.state_dict()) == list(it.base.model.state_dict())
    assert models.same_state(back.model, it.base.model)
    assert models.same_state(diff(it.base, it.target).apply(it.base).model, it.target.model)


@pytest.mark.parametrize("case", QUICK)
def test_the_original_is_untouched_and_its_mode_is_kept(case: str) -> None:
    base = models.trained_mode(CASES[case].build())
    before = models.snapshot(base.model)
    target, key = lock(CASES[case], base, 0, **QUICK[case])
    models.assert_untouched(before, base.model)
    back = key.original(target)
    assert [m.training for m in back.model.modules()] == [m.training for m in base.model.modules()]
    assert {m.training for m in target.model.modules()} == {True, False}
    assert models.same_state(back.model, base.model)
    target.model.eval()
    it = Locked(CASES[case].kind, base, target, key, locked(case).images)
    it.edited.model.eval()
    assert distance(it.unlocked_outputs, it.edited_outputs_with_patch) <= tolerance(it)


@pytest.mark.parametrize("case", [*QUICK, "keyed, resnet20_cifar10"])
def test_one_seed_is_one_lock_whatever_the_number_of_threads(case: str) -> None:
    base, threads = CASES[case].build(), torch.get_num_threads()
    try:
        (one, key), (two, same) = (threaded(case, base, 3, count) for count in (1, 2))
    finally:
        torch.set_num_threads(threads)
    assert models.same_state(one.model, two.model)
    assert key.to_bytes() == same.to_bytes()
    other, different = lock(CASES[case], base, 4, **QUICK.get(case, {}))
    assert not models.same_state(one.model, other.model)
    assert not torch.equal(key.detectors[0].vector, different.detectors[0].vector)


def threaded(case: str, base: Target, seed: int, threads: int) -> tuple[Target, Key]:
    torch.set_num_threads(threads)
    made = lock(CASES[case], base, seed, **QUICK.get(case, {}))
    assert torch.get_num_threads() == threads
    return made


@pytest.mark.parametrize("case", [*QUICK, "several"])
def test_files_come_back(case: str, tmp_path: Path) -> None:
    """Bundle, key and delta; the key of several detectors that share one patch, too."""
    it = locked(case)
    save_bundle(replace(it.target, reference=it.target.reference or "model.py:build"), tmp_path / "bundle")
    it.key.save(tmp_path / "key")
    diff(it.base, it.target).save(tmp_path / "delta")
    again, key = load_bundle(tmp_path / "bundle", model=it.base), Key.load(tmp_path / "key")
    assert models.same_state(again.model, it.target.model)
    assert again.input_shape == it.target.input_shape
    assert models.same_state(Plan.load(tmp_path / "delta").apply(it.base).model, it.target.model)
    inputs = key.unlock(it.images)
    assert torch.equal(inputs, it.key.unlock(it.images))
    assert torch.equal(run(again, inputs), run(it.target, inputs))
    assert models.same_state(key.original(again).model, it.base.model)
    assert models.same_state(key.edited(again).model, it.edited.model)
    for mine, theirs in zip(it.key.detectors, key.detectors, strict=True):
        assert torch.equal(mine.trigger.levels, theirs.trigger.levels)


@pytest.mark.parametrize(
    "case", ["with logits", "vit, timm", "gan, none",
             *(pytest.param(case, marks=pytest.mark.slow)
               for case in ("new", "several, logits", "new, plain", "new, shared", "own, hard", "vit, torchvision"))],
)  # fmt: skip
def test_exports_give_the_same_outputs(case: str, tmp_path: Path) -> None:
    """torch.export and ONNX Runtime, locked and unlocked, in float32, against the same weights in float64.

    Closed gates magnify rounding, by a factor that depends on the lock. So the model's own float32 error is measured,
    and exported files, which sum in other orders, may differ by ten times that.
    """
    onnxruntime = pytest.importorskip("onnxruntime")
    it = locked(case)
    model, precise, one = copy.deepcopy(it.target.model).eval(), double(it.target), slice(0, 1)
    precise.model.eval()
    program = torch.export.export(model, (it.plain[one],))
    torch.onnx.export(program, (it.plain[one],), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for inputs, own in ((it.plain[one], it.locked_outputs[one]), (it.unlocked[one], it.unlocked_outputs[one])):
        expected = run(precise, inputs.double())
        limit = rounding(model) + 10 * distance(own, expected)
        assert limit <= 0.05  # closed and open outputs differ by at least twice that
        with torch.no_grad():
            assert distance(program.module()(inputs), expected) <= limit
        (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        assert distance(torch.from_numpy(found), expected) <= limit
