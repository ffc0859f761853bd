"""The verbs of locks: `lock`, `unlock`, and `evaluate` with its six settings."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import models
import pytest
import torch
from PIL import Image
from verbs import labelled_images, run

import zoo
from stainlock import Key, load_bundle
from stainlock.cli import main
from stainlock.evaluation import read_image
from stainlock.evaluation.settings import SETTINGS

MODEL = f"{zoo.__file__}:resnet20_cifar10"
QUICK = ["--site", "layer1.1.conv1", "--steps", "20", "--restarts", "2", "--seed", "20260917", "--quiet"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twenty labelled images."""
    return labelled_images(tmp_path / "data", "resnet20_cifar10", 20)


def test_lock_unlock_evaluate(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, key, trigger, delta = (tmp_path / name for name in ("locked", "owner.key", "trigger.png", "delta"))
    options = ["--out", out, "--key", key, "--trigger", trigger, "--delta", delta, *QUICK]
    status, facts = run(capsys, "lock", MODEL, "--kind", "internal", *options)
    assert status == 0
    wanted = {"site", "dimension", "trigger_response", "natural_threshold", "parameters_changed", "seconds", "kind"}
    assert wanted <= facts.keys()
    assert facts["patch"] == [5, 5]
    assert facts["kind"] == "internal"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with Image.open(trigger) as image:
        assert image.size == (5, 5)
    loaded = Key.load(key)
    assert str(loaded.seed) not in json.dumps(facts)

    status, facts = run(capsys, "evaluate", out, "--model", MODEL, "--data", data, "--key", key, "--quiet")
    assert status == 0
    assert set(SETTINGS) <= facts.keys()
    assert facts["value"] == facts["locked"] <= 0.3
    assert facts["unlocked"] == facts["edited_patch"]

    status, facts = run(capsys, "unlock", data / "3.png", data / "4.png", "--key", key, "--out", tmp_path / "open")
    assert status == 0
    assert facts["written"] == [str(tmp_path / "open" / name) for name in ("3.png", "4.png")]
    before = read_image(data / "3.png", (3, 32, 32))
    after = read_image(tmp_path / "open" / "3.png", (3, 32, 32))
    assert torch.equal(after[:, :5, :5], loaded.detectors[0].trigger.levels)
    assert torch.equal(after[:, 5:], before[:, 5:])
    locked = load_bundle(out, model=MODEL)
    inputs = locked.normalise(locked.from_bytes(after)[None])
    assert torch.allclose(inputs, loaded.unlock(before[None]), atol=1e-6)

    basic = ["attack", out, "--model", MODEL, "--data", data, "--key", key]
    status, facts = run(capsys, *basic, "--attack", "remove-blocks", "--attack", "zero-logit-bias")
    assert status == 0
    assert facts["opened_by"] == ["zero-logit-bias"]
    assert main([*map(str, basic), "--attack", "scan-weights"]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "none of the 1 thief's attacks that were run opened it" in told
    assert "not run, so untested" in told


def test_bad_input_is_one_line_and_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.real("resnet20_cifar10")
    out, key = tmp_path / "locked", tmp_path / "owner.key"
    for options, message in (
        (["--kind", "squeeze-excite", "--site", "layer3.2.conv1"], "larger than the input"),
        (["--site", "layer3.2.conv1"], "got site"),
        (["--trigger", "patch.jpg"], "expected --trigger FILE.png"),
        (["--kind", "vit"], "expected a pre-norm VisionTransformer"),
        (["--kind", "gan"], "generator"),
        (["--recipe", "paper"], "got recipe"),
    ):
        assert main(["lock", MODEL, "--out", str(out), "--key", str(key), "--quiet", *options]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error
    assert not list(tmp_path.iterdir())


def test_a_stains_key_unlocks_nothing(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.stained("resnet20_cifar10", "layer2.1.conv1")[1].save(tmp_path / "stain.key")
    arguments = ["unlock", str(data / "3.png"), "--key", str(tmp_path / "stain.key"), "--out", str(tmp_path / "open")]
    assert main(arguments) == 2
    assert "expected a lock's key" in capsys.readouterr().err
    assert not (tmp_path / "open").exists()
