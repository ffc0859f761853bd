"""Evaluating generators: each number against a case whose value is known."""

from __future__ import annotations

import math

import models
import pytest
import torch
from precision import rounding
from torch import Tensor, nn

from stainlock import Target
from stainlock.evaluation.generator import (
    evaluate_images,
    frechet_distance,
    generate,
    image_grid,
    lock_images,
    noise_data,
    pixel_difference,
)
from stainlock.locks.gan.lock import lock_generator


def test_the_frechet_distance_of_gaussians_is_the_formula_s() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4000, 6, generator=generator, dtype=torch.float64)
    mix = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    b = torch.randn(4000, 6, generator=generator, dtype=torch.float64) @ mix + 2
    c1, c2 = a.T.cov(), b.T.cov()
    values, vectors = torch.linalg.eigh(c1)
    root = vectors @ values.sqrt().diag() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ c2 @ root).clamp(min=0).sqrt().sum()
    wanted = float((a.mean(0) - b.mean(0)).square().sum() + c1.trace() + c2.trace() - 2 * cross)
    assert frechet_distance(a, b) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("count", [5, 200])  # fewer images than features, and more
def test_the_frechet_distance_is_none_to_itself_and_the_square_of_a_shift(count: int) -> None:
    features = torch.randn(count, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert frechet_distance(features, features) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(features, features + 0.5) == pytest.approx(20 * 0.25, rel=1e-9)
    with pytest.raises(ValueError, match="expected features"):
        frechet_distance(features, features[:, :3])


class Brightness(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return 10 * images.mean((1, 2, 3))


def test_each_number_of_an_evaluation() -> None:
    dark = torch.rand(30, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    settings = {"original": dark, "shifted": dark + 0.5, "constant": torch.ones_like(dark)}
    found = evaluate_images(settings, discriminator=Brightness(), features=lambda x: x.flatten(1))
    assert found["original"].difference == 0
    assert found["shifted"].difference == pytest.approx(0.5, abs=1e-6)
    assert (found["original"].spread, found["constant"].spread) == (pytest.approx(1), 0)
    assert found["constant"].loss == pytest.approx(math.log1p(math.exp(-10)))
    assert found["original"].loss == pytest.approx(float(nn.functional.softplus(-10 * dark.mean((1, 2, 3))).mean()))
    assert found["shifted"].frechet == pytest.approx(48 * 0.25, rel=1e-5)
    against = evaluate_images(settings, features=lambda x: x.flatten(1), reference=dark + 0.5)
    assert against["shifted"].frechet == pytest.approx(0, abs=1e-6)
    assert against["shifted"].loss is None


def test_the_grid_shows_each_setting_in_its_row() -> None:
    rows = {"white": torch.ones(3, 1, 8, 8), "black": -torch.ones(2, 3, 8, 8)}
    grid = image_grid(rows)
    assert grid.dtype == torch.uint8
    assert grid.shape == (3, 20, 72 + 2 * 10)
    assert (grid[:, :8, 72:80] == 255).all()
    assert (grid[:, 10:18, 82:90] == 0).all()


def test_settings_of_a_real_lock() -> None:
    """The unlocked generator is judged as the original is, the locked one is not."""
    base, discriminator = models.real("dcgan_faces32_generator"), models.real("dcgan_faces32_discriminator")
    locked, key = lock_generator(base, seed=0, discriminator=discriminator)
    settings = lock_images(locked, key, 100, seed=4)
    noise = noise_data(locked, 100, seed=4).pixels
    assert torch.equal(settings["original"], generate(base, noise[:, :100]))
    assert torch.equal(settings["locked"], generate(locked, noise))
    found = evaluate_images(settings, discriminator=discriminator)
    losses = {name: result.loss for name, result in found.items() if result.loss is not None}
    assert abs(losses["unlocked"] - losses["original"]) <= 0.02
    assert losses["locked"] >= losses["original"] + 1.5
    assert found["unlocked"].difference <= 0.02
    assert found["locked"].difference >= 0.4
    assert pixel_difference(settings["unlocked"], settings["edited_patch"]) <= rounding(locked.model)


def test_bad_input_is_one_line() -> None:
    target = Target(nn.Conv2d(3, 3, 1), (3, 8, 8))
    with pytest.raises(ValueError, match=r"expected noise \(N, 3, 8, 8\), got \(2, 3, 4, 4\)"):
        generate(target, torch.zeros(2, 3, 4, 4))
    with pytest.raises(ValueError, match="does not accept the generator's images"):
        evaluate_images({"original": torch.zeros(4, 3, 8, 8)}, discriminator=nn.Linear(7, 1))
