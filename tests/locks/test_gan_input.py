"""The lock of generators refuses what it can't lock or use, with one line that says what was found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gan_models import EXTRA, NOISE, locked
from torch import Tensor, nn

from stainlock import ModelError, StainlockError, Target
from stainlock.insertion import Insertion
from stainlock.locks.gan.lock import lock_generator


class _Reshaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(NOISE, 32)

    def forward(self, noise: Tensor) -> Tensor:
        return self.first(noise.flatten(1))


def _target(*layers: nn.Module) -> Target:
    return Target(nn.Sequential(*layers).eval(), (NOISE, 1, 1), (0,), (1,), (-1, 1))


FIRST, NORM = nn.ConvTranspose2d(NOISE, 8, 4), nn.BatchNorm2d(8)
REFUSED: dict[str, tuple[Callable[[], Target], str]] = {
    "images": (lambda: Target(nn.Conv2d(3, 3, 3), (3, 8, 8)), r"expected a generator of noise vectors.*\(3, 8, 8\)"),
    "dense": (lambda: _target(_Reshaping()), "noise is read by flatten: expected one ConvTranspose2d"),
    "convolution": (lambda: _target(nn.Conv2d(NOISE, 8, 1), NORM), "is read by 0, a Conv2d"),
    "stride": (lambda: _target(nn.ConvTranspose2d(NOISE, 8, 4, 2), NORM, nn.Conv2d(8, 3, 3)), r"stride \(2, 2\)"),
    "no norm": (lambda: _target(FIRST, nn.ReLU(), nn.Conv2d(8, 3, 3)), "no batch norm .* follows 0"),
    "upsampled": (lambda: _target(FIRST, NORM, nn.Upsample(8), nn.Conv2d(8, 3, 3)), "found Upsample at 2"),
    "short": (lambda: _target(FIRST, NORM, nn.Tanh()), "found the model's output after it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_structure_is_refused_with_what_was_found(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(StainlockError, match=message):
        lock_generator(make())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 1}, "at least 4 more"),
        ({"noise": "poisson"}, "'uniform' or 'normal', got 'poisson'"),
        ({"deviations": -1.0}, "above 0"),
        ({"channel": 99}, "from 0 to 31, got 99"),
        ({"steps": 0}, "at least 1 step"),
        ({"discriminator": nn.Linear(7, 1)}, r"does not accept the generator's images of \(3, 16, 16\)"),
        ({"discriminator": nn.Identity()}, "one output per image"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, object], message: str) -> None:
    base = _halved()
    with pytest.raises(ValueError, match=message) as caught:
        lock_generator(base, **options)
    assert "\n" not in str(caught.value)


def _halved() -> Target:
    """With a reader that upsamples by 4, to 16×16."""
    layers = (nn.ConvTranspose2d(NOISE, 32, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 4))
    return _target(*layers)


@pytest.mark.parametrize("shape", [(2, NOISE + EXTRA, 1, 1), (2, NOISE - 1, 1, 1), (2, NOISE), (2, NOISE, 2, 2)])
def test_noise_of_another_length_is_one_line(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"expected noise vectors \(N, {NOISE}, 1, 1\), got"):
        locked("relu").key.unlock(torch.zeros(shape))


@pytest.mark.parametrize("at", ["2", "3"])  # a ReLU, and a layer that does not read the noise
def test_inputs_can_t_be_put_into_another_layer(at: str) -> None:
    target = _halved()
    with pytest.raises(ModelError, match=f"{at} does not read {NOISE} noise inputs"):
        Insertion("noise-inputs", at, {"dimensions": 3}).insert(target)
