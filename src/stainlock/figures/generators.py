"""Generators in figures: their inputs, and measures of their images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from stainlock.certificates.noise import noise_law
from stainlock.evaluation import Data, Tensors
from stainlock.evaluation.generator import (
    discriminator_loss,
    frechet_distance,
    generate,
    lock_images,
    noise_data,
    pixel_difference,
)
from stainlock.facts import GeneratorFacts
from stainlock.figures import diffusion
from stainlock.figures.frechet import Extractor, load_extractor
from stainlock.figures.measures import Numbers
from stainlock.figures.subject import Subject
from stainlock.key import Key
from stainlock.locks.gan.disruptor import judge_of
from stainlock.models.references import load_reference
from stainlock.target import Target

LOSS, PIXELS = "discriminator loss", "difference of pixels"
_UNIT = (-1.0, 1.0)  # the range of generated images


@dataclass(frozen=True)
class GeneratorMeasure:
    """A discriminator's loss and the Fréchet distance to ``real`` images; with neither, the mean difference of pixels.

    Every model gets the same noise, so that images can be compared one by one.
    """

    images: Callable[[Target], Tensor]
    original: Tensor
    real: Tensor
    discriminator: Target | None = None
    extractor: Extractor | None = None
    seed: int = 0

    def measure(self, target: Target) -> Numbers:
        return self._numbers(self.images(target), self.original)

    def _numbers(self, images: Tensor, original: Tensor) -> Numbers:
        found: Numbers = {}
        if self.discriminator is not None:
            found[LOSS] = discriminator_loss(judge_of(self.discriminator, self.original), images)
        if self.extractor is not None:
            features = (self.extractor.features(part, _UNIT) for part in (images, self.real))
            found[self.extractor.name] = frechet_distance(*features)
        return found or {PIXELS: pixel_difference(images, original)}

    def six(self, locked: Target, key: Key) -> dict[str, Numbers]:
        settings = lock_images(locked, key, len(self.original), seed=self.seed)
        return {name: self._numbers(images, settings["original"]) for name, images in settings.items()}


def gan_subject(subject: Subject, count: int) -> tuple[GeneratorMeasure, Data]:
    """The measure of a noise-to-image generator, and its natural inputs."""
    setup, law = subject.setup, subject.setup.options.get("law", "uniform")
    noise = noise_data(subject.target, count, noise=law, seed=setup.seed)
    other = noise_data(subject.target, count, noise=law, seed=setup.seed + 1)
    original = generate(subject.target, noise.pixels)
    real = generate(subject.target, other.pixels) if subject.data is None else _real(subject, original)
    judge = setup.options.get("discriminator")
    measure = GeneratorMeasure(
        partial(generate, noise=noise.pixels), original, real, load_reference(judge) if judge else None,
        _extractor(subject), setup.seed,
    )  # fmt: skip
    return measure, noise


def new_inputs(locked: Target, key: Key, count: int, seed: int) -> tuple[Target, Data]:
    """A one-layer target that reads only the new inputs of a locked generator, and noise for them.

    This is what the lock's detector sees.
    """
    noise = GeneratorFacts.of(key).noise
    whole = noise_data(locked, count, noise=noise, seed=seed)
    shape = (key.dimension, 1, 1)
    centre = noise_law(locked, noise).centre  # responses are measured from the centre of the noise
    reader = nn.Sequential(nn.Conv2d(key.dimension, key.detectors[0].channel + 1, 1, bias=False))
    target = Target(reader, shape, mean=(centre,), std=(locked.std[-1],), bounds=locked.bounds)
    return target, Tensors(whole.pixels[:, -key.dimension :])


def diffusion_subject(subject: Subject, count: int) -> tuple[GeneratorMeasure, Data]:
    """The measure of a diffusion model, and its natural inputs: real images with noise added."""
    options, seed, target = subject.setup.options, subject.setup.seed, subject.target
    steps = int(options.get("steps", 1000))
    images = partial(
        diffusion.draw, count=int(options.get("drawn", count)), steps=steps,
        visited=int(options.get("visited", steps)), seed=seed,
    )  # fmt: skip
    real = _real(subject, torch.empty(0, *target.input_shape))
    measure = GeneratorMeasure(images, images(target), real, extractor=_extractor(subject))
    return measure, Tensors(diffusion.noised(target, real, steps, seed))


def _extractor(subject: Subject) -> Extractor | None:
    options = subject.setup.options
    return load_extractor(options["features"], options.get("feature_weights")) if options.get("features") else None


def _real(subject: Subject, like: Tensor) -> Tensor:
    """Real images in [−1, 1], at the size of generated ones."""
    reader = replace(subject.target, input_shape=tuple(like.shape[1:]), bounds=_UNIT, mean=(0,), std=(1,))
    return torch.cat([pixels for pixels, _ in subject.images.batches(reader, batch_size=64)])
