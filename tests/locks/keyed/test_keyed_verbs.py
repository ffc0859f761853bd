"""Keyed locks on the command line: lock, unlock, evaluate, certify, verify, and the model opened for good."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import models
import pytest
import torch
from verbs import labelled_images, run

import stainlock as sl
import zoo
from stainlock import Key, load_bundle
from stainlock.certificates.keyed import certify_keyed
from stainlock.cli import main
from stainlock.evaluation import read_image

MODEL = f"{zoo.__file__}:resnet20_cifar10"
TRUSTED = ["--model", MODEL, "--quiet"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Thirty labelled images."""
    return labelled_images(tmp_path / "data", "resnet20_cifar10", 30)


@pytest.mark.parametrize("carrier", ["patch", "strip"])
def test_from_lock_to_original(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], carrier: str) -> None:
    out, key, trigger = (tmp_path / name for name in ("locked", "owner.key", "trigger.png"))
    options = ["--out", out, "--key", key, "--trigger", trigger, "--carrier", carrier, "--seed", 20260917, "--quiet"]
    status, facts = run(capsys, "lock", MODEL, *options)
    assert status == 0
    assert facts["kind"] == "keyed"
    assert (facts["bits"], facts["gates"]) == (128, 20)
    assert facts["patch"] == ([7, 7] if carrier == "patch" else [32, 32])
    assert "trigger_response" not in facts
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    secret = Key.load(key)
    told = json.dumps(facts) + (out / "stainlock.json").read_text()
    assert str(secret.seed) not in told

    status, facts = run(capsys, "evaluate", out, "--data", data, "--key", key, *TRUSTED)
    assert status == 0
    assert facts["locked"] <= 0.3
    assert facts["unlocked"] == facts["original_patch"] == facts["edited_patch"]
    assert facts["original"] == facts["edited"] >= 0.8

    status, facts = run(capsys, "unlock", data / "3.png", "--key", key, "--out", tmp_path / "open")
    assert status == 0
    levels = read_image(tmp_path / "open" / "3.png", (3, 32 if carrier == "patch" else 64, 32))
    before = read_image(data / "3.png", (3, 32, 32))
    locked = load_bundle(out, model=MODEL)
    given = locked.normalise(locked.from_bytes(levels)[None])
    assert torch.allclose(given, secret.unlock(before[None]), atol=1e-6)
    png = sl.locks.Unlock.from_png(trigger, mean=locked.mean, std=locked.std, carrier=carrier)
    assert torch.allclose(png(before[None]), given, atol=1e-6)

    status, _ = run(capsys, "unlock", "--model", out, "--key", key, "--out", tmp_path / "original", "--code", MODEL)
    assert status == 0
    original = load_bundle(tmp_path / "original", model=MODEL)
    assert models.same_state(original.model, models.real("resnet20_cifar10").model)

    status, facts = run(capsys, "certify", out, "--key", key, *TRUSTED)
    assert (status, facts["samples"], facts["bounds"]["one_image"]) == (0, 0, pytest.approx(2.0**-128, rel=1e-9, abs=0))
    status, facts = run(capsys, "certify", out, "--key", key, "--data", data, *TRUSTED)
    assert (status, facts["samples"], facts["exceedances"]) == (0, 30, 0)
    assert facts["nearest"] >= 20
    assert facts["bounds"]["all_images"] == pytest.approx(30 * 2.0**-128, rel=1e-9, abs=0)


def test_a_stain_is_found_behind_the_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stained, stain_key = models.stained("resnet20_cifar10", "layer2.1.conv1")
    locked, lock_key = sl.lock(stained, seed=4)
    assert not sl.verify(locked.model.state_dict(), stain_key).stained
    assert sl.verify(lock_key.opened_weights(locked.model.state_dict()), stain_key).stained
    assert sl.verify(lock_key.opened(locked), stain_key).stained
    assert models.same_state(lock_key.original(locked).model, stained.model)

    sl.save_bundle(locked, tmp_path / "locked")
    stain_key.save(tmp_path / "stain.key")
    lock_key.save(tmp_path / "lock.key")
    suspect = ["verify", tmp_path / "locked", "--key", tmp_path / "stain.key", "--method", "weights", "--quiet"]
    status, facts = run(capsys, *suspect)
    assert (status, facts["verdict"]) == (1, "not stained")
    status, facts = run(capsys, *suspect, "--lock-key", tmp_path / "lock.key")
    assert (status, facts["verdict"]) == (0, "stained")


def test_a_strip_higher_than_the_image_is_read_from_the_image_repeated() -> None:
    target = models.conv_net()
    locked, key = sl.lock(target, seed=1, carrier="strip")
    pixels = torch.rand(4, *target.input_shape, generator=torch.Generator().manual_seed(0))
    assert key.details["layout"]["rows"] * key.details["layout"]["tile"] > target.input_shape[1]
    certificate = certify_keyed(locked, key, [pixels])
    assert 30 <= (certificate.nearest or 0) <= (certificate.farthest or 0) <= 98
    assert certificate.bounds["one_image"] == pytest.approx(2.0**-128, rel=1e-9, abs=0)
    assert certificate.bounds["all_images"] == pytest.approx(4 * 2.0**-128, rel=1e-9, abs=0)
    with pytest.raises(ValueError, match=r"expected images that hold the key's 128 bits in 64×16 pixels"):
        certify_keyed(locked, key, [pixels[..., :8]])


def test_generators_get_their_bits_as_noise() -> None:
    target = models.transposed_net()
    locked, key = sl.lock(target, seed=5)
    assert locked.input_shape == (20 + 128, 1, 1)
    noise = torch.rand(2, 20, 1, 1) * 2 - 1
    assert torch.allclose(locked(key.unlock(noise)), target.predict(noise), atol=1e-5)
    certificate = certify_keyed(locked, key, [torch.rand(50, 148, 1, 1) * 2 - 1])
    assert 30 <= (certificate.nearest or 0) <= certificate.mean_distance <= (certificate.farthest or 0) <= 98


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "20"], "expected 64 to 256 bits"),
        (["--patch", "3x3"], "expected a patch that holds 128 bits"),
        (["--gates", "bn1"], "bn1 can't have a gate"),
        (["--site", "layer1.0.conv1"], "use kind internal or squeeze-excite, which has it"),
        (["--trigger", "patch.jpg"], "expected --trigger FILE.png"),
        (["--kind", "internal", "--gates", "all"], "expected --gates N"),
        (["--kind", "internal", "--bits", "128"], "got bits"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    models.real("resnet20_cifar10")
    out, key = tmp_path / "locked", tmp_path / "owner.key"
    assert main(["lock", MODEL, "--out", str(out), "--key", str(key), "--quiet", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not list(tmp_path.iterdir())


def test_another_locks_key(tmp_path: Path) -> None:
    target = models.conv_net()
    (first, _), (_, second) = (sl.lock(target, seed=seed) for seed in (1, 2))
    with pytest.raises(sl.FileError, match="for another model"):
        second.original(first)
    pixels = torch.rand(2, 3, 16, 16)
    with torch.inference_mode():
        assert not torch.allclose(first(second.unlock(pixels)), target(second.unlock(pixels)), atol=1e-2)
