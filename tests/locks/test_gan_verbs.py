"""The verbs `unlock` and `evaluate` for generators."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from verbs import run

import zoo
from stainlock import Key, load_bundle, save_bundle, stain
from stainlock.cli import main
from stainlock.evaluation.generator import generate, pixel_difference
from stainlock.locks.gan.lock import lock_generator

MODEL = f"{zoo.__file__}:dcgan_faces32_generator"
JUDGE = f"{zoo.__file__}:dcgan_faces32_discriminator"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundle of a locked generator, and its key, which all tests only read."""
    folder = tmp_path_factory.mktemp("generator")
    locked, key = lock_generator(models.real("dcgan_faces32_generator"), seed=0, steps=20)
    save_bundle(locked, folder / "locked")
    key.save(folder / "owner.key")
    return folder / "locked", folder / "owner.key"


def test_unlock_and_evaluate(tmp_path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundle, key = files
    noise = torch.rand(6, 100, 1, 1) * 2 - 1
    save_file({"noise": noise}, tmp_path / "a.safetensors")
    save_file({"z": noise[0, :, 0, 0].clone()}, tmp_path / "b.safetensors")
    inputs = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    status, facts = run(capsys, "unlock", *inputs, "--key", key, "--out", tmp_path / "open", "--quiet")
    assert status == 0
    assert facts["written"] == [str(tmp_path / "open" / path.name) for path in inputs]
    opened = load_file(tmp_path / "open" / "a.safetensors")["noise"]
    assert torch.equal(opened, Key.load(key).unlock(noise))
    assert torch.equal(load_file(tmp_path / "open" / "b.safetensors")["noise"], opened[:1])
    images = generate(load_bundle(bundle, model=MODEL), opened)
    assert pixel_difference(images, generate(models.real("dcgan_faces32_generator"), noise)) <= 0.02

    grid = tmp_path / "grid.png"
    options = ["--noise", "40", "--key", key, "--discriminator", JUDGE, "--grid", grid, "--quiet"]
    status, facts = run(capsys, "evaluate", bundle, "--model", MODEL, *options)
    assert status == 0
    assert facts["metric"] == "discriminator_loss"
    assert facts["value"] == facts["locked"]
    assert facts["images"] == 40
    assert abs(facts["unlocked"] - facts["original"]) <= 0.05
    assert facts["settings"]["unlocked"]["difference"] <= 0.02 < 0.4 <= facts["settings"]["locked"]["difference"]
    with Image.open(grid) as image:
        assert image.height == 4 * 34

    status, facts = run(
        capsys, "evaluate", bundle, "--model", MODEL, "--noise", "10", "--key", key, "--features", JUDGE, "--quiet"
    )
    assert status == 0
    assert facts["metric"] == "pixel_difference"
    assert facts["settings"]["original"]["frechet"] == pytest.approx(0, abs=1e-6)
    assert facts["settings"]["locked"]["frechet"] > facts["settings"]["unlocked"]["frechet"]


def test_evaluate_a_stained_generator_against_real_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stained, key = stain(models.real("dcgan_faces32_generator"), site="generator_deconv.2.0", seed=0, steps=10)
    save_bundle(stained, tmp_path / "stained")
    key.save(tmp_path / "owner.key")
    (tmp_path / "real").mkdir()
    for i in range(4):
        levels = torch.randint(256, (32, 32, 3), dtype=torch.uint8)
        Image.fromarray(levels.numpy()).save(tmp_path / "real" / f"{i}.png")
    options = ["--noise", "20", "--key", tmp_path / "owner.key", "--features", JUDGE, "--data", tmp_path / "real"]
    status, facts = run(capsys, "evaluate", tmp_path / "stained", "--model", MODEL, *options, "--quiet")
    assert status == 0
    assert facts["value"] == facts["stained"] <= 0.1
    frechet = {name: found["frechet"] for name, found in facts["settings"].items()}
    assert frechet["original"] > 10 * abs(frechet["stained"] - frechet["original"])  # noise is far from both


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (["unlock", "short"], "expected noise (100,) or (N, 100, 1, 1)"),
        (["unlock", "text"], "is not a noise file: expected safetensors"),
        (["evaluate", "--grid"], "expected --noise N with --grid"),
        (["evaluate", "--data"], "expected --noise N: this key is a generator's"),
        (["evaluate"], "expected --data DIR or, for a generator, --noise N"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    tmp_path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], verb: list[str], message: str
) -> None:
    bundle, key = files
    save_file({"noise": torch.zeros(3, 99, 1, 1)}, tmp_path / "short")
    (tmp_path / "text").write_text("no noise", encoding="utf-8")
    if "--data" in verb:
        arguments = ["evaluate", bundle, "--model", MODEL, "--key", key, "--data", tmp_path / "images"]
        (tmp_path / "images").mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / "images" / "black.png")
    elif verb[0] == "unlock":
        arguments = ["unlock", tmp_path / verb[1], "--key", key, "--out", tmp_path / "out"]
    else:
        arguments = [
            "evaluate",
            bundle,
            "--model",
            MODEL,
            "--key",
            key,
            *verb[1:],
            *([tmp_path / "out"] if verb[1:] else []),
        ]
    assert main([*map(str, arguments), "--quiet"]) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed
    assert "\n" not in printed
    assert not (tmp_path / "out").exists()
