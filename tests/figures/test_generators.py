"""Diffusion and Fréchet distances."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from figure_models import write_models
from precision import rounding
from torch import Tensor, nn

from stainlock import ModelError, Target
from stainlock.evaluation.generator import frechet_distance
from stainlock.figures.diffusion import draw, kept, noised, timestep_of
from stainlock.figures.figure import Setup
from stainlock.figures.frechet import extractor_note, load_extractor

STEPS = 100


class Knows(nn.Module):
    """Predicts the noise in an image exactly, because it knows what the image was."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.image = nn.Parameter(image)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        share = kept(STEPS)[timestep].float().view(-1, 1, 1, 1)
        return (x - share.sqrt() * self.image) / (1 - share).sqrt()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("made"))


@pytest.fixture
def diffusion() -> Target:
    image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return Target(Knows(image), (1, 8, 8), (0,), (1,), (-3, 3), extra_inputs=(torch.tensor([40]),))


@pytest.mark.parametrize("visited", [2, 10, STEPS])
def test_a_perfect_model_draws_what_it_knows(diffusion: Target, visited: int) -> None:
    drawn = draw(diffusion, 3, steps=STEPS, visited=visited, seed=0)
    assert torch.allclose(drawn, diffusion.model.image.expand(3, 1, 8, 8), atol=1e-4)


def test_noised_images_have_the_share_they_should(diffusion: Target) -> None:
    images = torch.ones(500, 1, 8, 8)
    found = noised(diffusion, images, STEPS, seed=0)
    share = float(kept(STEPS)[timestep_of(diffusion)])
    assert float(found.mean()) == pytest.approx(share**0.5, abs=0.02)
    assert float(found.std()) == pytest.approx((1 - share) ** 0.5, abs=0.02)


def test_a_model_without_timestep_is_told() -> None:
    with pytest.raises(ModelError, match="expected a diffusion model"):
        timestep_of(Target(nn.Linear(2, 2), (2,), (0,), (1,)))


def test_features_are_those_before_the_last_layer(made: Path) -> None:
    reference = f"{made / 'small.py'}:model"
    extractor, target = load_extractor(reference), Target.from_reference(reference)
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        wanted = target.model[:-1].eval()(target.normalise(images))
    found = extractor.features(images * 2 - 1, (-1, 1))
    assert torch.allclose(found.float(), wanted, atol=rounding(target.model) * float(wanted.max()))
    assert extractor.features(images[:, :1], (0, 1)).shape == (6, 64), "grey images count as colour"
    assert frechet_distance(found, found) == pytest.approx(0, abs=1e-6)
    assert extractor_note(Setup(options={"features": reference}))[0].endswith("so it is not FID.")


def test_inception_says_what_it_needs() -> None:
    with pytest.raises(ModelError, match=r"FID needs (torchmetrics|Inception's weights).*--features MODEL"):
        load_extractor("inception")


def test_an_extractor_must_take_images(made: Path) -> None:
    with pytest.raises(ModelError, match="expected a model of colour images"):
        load_extractor(f"{made / 'small.py'}:generator")
