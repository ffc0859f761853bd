"""How well a generator performs: a discriminator's loss, pixel differences to the original, and the Fréchet distance.

All settings get the same noise, so their images can be compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from stainlock.certificates.noise import NoiseName, noise_law
from stainlock.evaluation.data import Tensors
from stainlock.facts import GeneratorFacts
from stainlock.key import Key
from stainlock.locks.gan.disruptor import Judge, judge_of
from stainlock.target import Target, evaluation_mode

Extractor = Callable[[Tensor], Any]  # images to features (N, F)
_BATCH = 50
_GROUND = (110, 110, 110)  # mid grey, unlike the saturated colours of ruined images
_LABEL = 72  # pixels left of a grid's rows, for their names


@dataclass(frozen=True)
class GeneratorEvaluation:
    """Results of one setting; pixels are on the scale of the images, [−1, 1] after a tanh.

    ``loss`` is the discriminator's cross-entropy for calling the images real, ``difference`` the mean absolute
    difference from the original's images, ``spread`` the standard deviation of images over noise relative to the
    original's, and ``frechet`` the Fréchet distance to the reference's features.
    """

    images: int
    difference: float
    spread: float
    loss: float | None = None
    frechet: float | None = None


def noise_data(target: Target, count: int, *, noise: NoiseName = "uniform", seed: int = 0) -> Tensors:
    """Noise vectors drawn from the target's distribution, for `certify` and other functions that take data."""
    if count < 1:
        raise ValueError(f"expected at least 1 noise vector, got {count}")
    generator = torch.Generator().manual_seed(seed)
    return Tensors(noise_law(target, noise).sample((count, *target.input_shape), generator))


def generate(target: Target, noise: Tensor, batch_size: int = _BATCH) -> Tensor:
    """The generator's images for noise of the target's input shape."""
    if noise.dim() != 4 or tuple(noise.shape[1:]) != target.input_shape:
        raise ValueError(f"expected noise (N, {', '.join(map(str, target.input_shape))}), got {tuple(noise.shape)}")
    with evaluation_mode(target.model), torch.inference_mode():
        return torch.cat([target.predict(part).float().cpu() for part in noise.split(batch_size)])


def lock_images(locked: Target, key: Key, count: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Images of the original, edited and locked generator, without the trigger and with it.

    The original has no inputs for a trigger, so its images are the same in both settings. Without the trigger, the
    other two get noise in its place, as from someone who knows only the length of the input.
    """
    key.check_lock()
    if key.carrier != "entries":
        raise ValueError(f"expected a generator's lock, got one of kind {key.schema}")
    law = GeneratorFacts.of(key).noise if key.schema == "gan" else "uniform"
    noise = noise_data(locked, count, noise=law, seed=seed).pixels
    own = noise[:, : key.conventions["input_shape"][0]]
    opened = key.unlock_transform(normalise=False)(own)
    edited = key.edited(locked)
    original = generate(key.original(locked), own)
    return {
        "original": original, "original_patch": original, "edited": generate(edited, noise),
        "edited_patch": generate(edited, opened), "locked": generate(locked, noise),
        "unlocked": generate(locked, opened),
    }  # fmt: skip


def evaluate_images(
    settings: dict[str, Tensor],
    *,
    discriminator: Target | Callable[[Tensor], Any] | None = None,
    features: Extractor | None = None,
    reference: Tensor | None = None,
) -> dict[str, GeneratorEvaluation]:
    """Compares each setting's images with those of ``original``.

    With ``features``, the Fréchet distance to the ``reference`` images is added, or to the original's if there are
    none. It is FID if the extractor is Inception's pool and the usual 50,000 images are used.
    """
    original = settings["original"]
    judge = judge_of(discriminator, original) if discriminator is not None else None
    spread = max(float(original.double().std(0).mean()), 1e-12)
    described = _features(features, original if reference is None else reference) if features is not None else None
    results = {}
    for name, images in settings.items():
        loss = discriminator_loss(judge, images) if judge is not None else None
        frechet = None
        if features is not None and described is not None:
            frechet = frechet_distance(_features(features, images), described)
        varied = float(images.double().std(0).mean()) / spread
        results[name] = GeneratorEvaluation(len(images), pixel_difference(images, original), varied, loss, frechet)
    return results


def pixel_difference(images: Tensor, others: Tensor) -> float:
    """Mean absolute difference, pixel by pixel."""
    return float((images.double() - others.double()).abs().mean())


def discriminator_loss(judge: Judge, images: Tensor) -> float:
    """E log(1 + e^{−D(x)}): the discriminator's cross-entropy for calling the images real."""
    with torch.inference_mode():
        return float(torch.cat([F.softplus(-judge(part)).double() for part in images.split(_BATCH)]).mean())


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """‖μ₁ − μ₂‖² + tr(C₁ + C₂ − 2(C₁C₂)^½) of two samples of features ``(N, F)``."""
    for sample in (first, second):
        if sample.dim() != 2 or len(sample) < 2 or sample.shape[1] != first.shape[1]:
            raise ValueError(f"expected features (N, F) of two or more images, got {tuple(sample.shape)}")
    (mean1, root1), (mean2, root2) = (_centred(sample.double().cpu()) for sample in (first, second))
    # The trace of (C₁C₂)^½ is the sum of the singular values of A₁A₂ᵀ, where C = AᵀA: no ill-conditioned matrix root.
    cross = torch.linalg.svdvals(root1 @ root2.T).sum()
    traces = root1.square().sum() + root2.square().sum()
    return max(0.0, float((mean1 - mean2).square().sum() + traces - 2 * cross))


def _centred(features: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, and a matrix A of at most F rows such that AᵀA is the covariance."""
    mean = features.mean(0)
    root = (features - mean) / (len(features) - 1) ** 0.5
    return mean, torch.linalg.qr(root).R if len(root) > root.shape[1] else root


def _features(extractor: Extractor, images: Tensor) -> Tensor:
    run: Extractor = extractor.predict if isinstance(extractor, Target) else extractor
    with torch.inference_mode():
        parts = [run(part) for part in images.split(_BATCH)]
    if any(not isinstance(part, Tensor) for part in parts):
        raise ValueError(f"expected features as a tensor (N, F), got {type(parts[0]).__name__}")
    return torch.cat([part.flatten(1).double().cpu() for part in parts])


def image_grid(rows: dict[str, Tensor], *, bounds: tuple[float, float] = (-1.0, 1.0), columns: int = 12) -> Tensor:
    """A picture with one labelled row per setting, as 8-bit levels ``(3, H, W)``."""
    low, high = bounds
    height, width = next(iter(rows.values())).shape[-2:]
    columns = min(columns, min(len(images) for images in rows.values()))
    canvas = Image.new("RGB", (_LABEL + columns * (width + 2), len(rows) * (height + 2)), _GROUND)
    for row, (name, images) in enumerate(rows.items()):
        top = row * (height + 2)
        ImageDraw.Draw(canvas).text((4, top + height // 2 - 6), name, fill="white")
        levels = ((images[:columns].double() - low) * (255 / (high - low))).round().clamp(0, 255).byte()
        for column, image in enumerate(levels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)):
            canvas.paste(Image.fromarray(image.contiguous().numpy()), (_LABEL + column * (width + 2), top))
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1).contiguous()
