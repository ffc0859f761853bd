"""Patches read back from prepared images: what is right, wrong or unsure, and images that can't be read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import stainlock as sl
from stainlock import Key, Target
from stainlock.cli.app import main
from stainlock.unlocking import read_back


@cache
def key(carrier: str = "patch") -> Key:
    model = models.seeded(lambda: nn.Sequential(nn.Conv2d(3, 16, 3, stride=8), nn.Flatten(), nn.Linear(4096, 5)))
    target = Target(model, (3, 128, 128))
    return sl.lock(target, seed=1, carrier=carrier)[1]


def prepared(carrier: str = "patch") -> Tensor:
    images = torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    return key(carrier).unlock_transform(normalise=False)(images)


@pytest.mark.parametrize("carrier", ["patch", "strip"])
def test_what_was_prepared_opens_in_any_light(carrier: str) -> None:
    for images in (prepared(carrier), prepared(carrier) * 0.6 + 0.1):
        found = read_back(images, key(carrier))
        assert found.opens.tolist() == [True, True]
        assert found.wrong.tolist() == found.unsure.tolist() == [0, 0]
        assert found.margin.tolist() == pytest.approx([1, 1], abs=1e-4)


def test_wrong_and_unsure_bits_are_counted() -> None:
    images = prepared()
    images[1, :, :2, 0:4] = 1 - images[1, :, :2, 0:4]  # the first bit: two neighbouring tiles
    images[1, :, :2, 4:8] = 0.5 + 0.1 * (images[1, :, :2, 4:8] - 0.5)  # the second
    found = read_back(images, key())
    assert found.opens.tolist() == [True, False]
    assert (found.wrong.tolist(), found.unsure.tolist()) == ([0, 1], [0, 1])
    assert found.said(1).startswith("closed: 1 of 128 bits are wrong, 1 unsure, least margin -1.0")


def test_images_without_the_patch_have_about_half_of_the_bits_wrong() -> None:
    found = read_back(torch.rand(20, 3, 128, 128, generator=torch.Generator().manual_seed(1)), key())
    assert not found.opens.any()
    assert 50 < float(found.wrong.double().mean()) < 78


@pytest.mark.parametrize("size", [(64, 64), (20, 128), (128, 127)])
def test_another_size_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected prepared images \(N, 3, 128, 128\).*resized or cropped can't be"):
        read_back(torch.zeros(1, 3, *size), key())


def test_other_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="expected the key of a keyed lock with a patch, got one of kind internal"):
        read_back(prepared(), replace(key(), schema="internal"))


def _saved(image: Tensor, path: Path, quality: int | None = None) -> Path:
    levels = Image.fromarray((255 * image).round().byte().permute(1, 2, 0).numpy())
    if quality is not None:
        file = io.BytesIO()
        levels.save(file, "JPEG", quality=quality)
        levels = Image.fromarray(np.array(Image.open(file)))
    levels.save(path)
    return path


def test_the_command_says_which_images_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, plain = prepared()[0], torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(2))
    owner = str(tmp_path / "owner.key")
    key().save(owner)
    right, jpeg = _saved(image, tmp_path / "right.png"), _saved(image, tmp_path / "jpeg.png", quality=90)
    assert main(["unlock", str(right), str(jpeg), "--key", owner, "--check"]) == 0
    assert capsys.readouterr().out.count("opens: all 128 bits are right") == 2
    closed = _saved(plain, tmp_path / "plain.png")
    assert main(["unlock", str(right), str(closed), "--key", owner, "--check", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["bits"] == 128
    assert [row["opens"] for row in told["images"]] == [True, False]
    assert told["images"][1]["wrong_bits"] > 30


@pytest.mark.parametrize("others", [["--check", "--out", "x"], ["--check", "--patch", "p.png"], []])
def test_a_command_that_makes_no_sense_is_refused(
    others: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = str(tmp_path / "owner.key")
    key().save(owner)
    image = _saved(prepared()[0], tmp_path / "right.png")
    assert main(["unlock", str(image), "--key", owner, *others]) == 2
    assert capsys.readouterr().err.startswith("error: expected ")
