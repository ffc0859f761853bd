"""The noise ν that a locked transformer adds to every token, found by gradient ascent on a sphere.

With labelled images it maximises their cross-entropy (the paper's line 6). Without labels it uses the model's own
answers as labels, and without images it uses synthetic inputs. If the output is not one row of logits per image, its
values are treated as logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.locks.vit.channel import epsilon_of, spread
from stainlock.locks.vit.model import ViT
from stainlock.target import check_gradient, evaluation_mode, synthetic_inputs
from stainlock.trigger import Progress

STRENGTH = 3.0
_PROBES, _PIXELS_A_BATCH = 16, 200_000
_FIRST_STEP, _LAST_STEP, _MOMENTUM = 0.5, 0.05, 0.7  # steps relative to the sphere's radius


@dataclass(frozen=True)
class Noise:
    """ν, and the fraction of answers that it changes on the inputs it was found with."""

    vector: Tensor
    changed: float


def find_noise(
    vit: ViT,
    k: int,
    strength: float,
    *,
    steps: int,
    generator: torch.Generator,
    embedded: bool = False,
    images: Tensor | None = None,
    labels: Tensor | None = None,
    progress: Progress | None = None,
) -> Noise:
    """ν with ``strength`` times a token's usual norm, 0 in channel k, and mean 0."""
    target = vit.target
    pixels = synthetic_inputs(target, _PROBES, generator) if images is None else images
    size = max(2, min(64, _PIXELS_A_BATCH // math.prod(target.input_shape[1:])))
    batches = pixels.split(size)
    usual = float(spread(vit.stream(batches[0]), epsilon_of(vit)).median())
    radius = strength * usual * math.sqrt(vit.width)
    with evaluation_mode(target.model), torch.no_grad():
        plain = [_output(target.predict(batch)) for batch in batches]
    answers = _answers(plain, labels, size)
    nu = _on_sphere(torch.randn(vit.width, generator=generator, dtype=torch.float64), k, radius)
    momentum = torch.zeros_like(nu)
    epsilon = epsilon_of(vit)

    def noisy(tokens: Tensor, noise: Tensor) -> Tensor:
        if embedded:
            return tokens - noise.to(tokens)
        own = usual / spread(tokens, epsilon)  # the circuit reads through a layer norm: small σ, more noise
        return tokens + noise.to(tokens) * own[..., None]

    with evaluation_mode(target.model), torch.enable_grad():
        for step in range(steps):
            which = step % len(batches)
            leaf = nu.clone().requires_grad_(True)
            with vit.with_stream(lambda tokens, noise=leaf: noisy(tokens, noise)):  # type: ignore[misc]
                output = _output(target.predict(batches[which]))
            check_gradient(output)
            (gradient,) = torch.autograd.grad(F.cross_entropy(output.float(), answers[which]), leaf)
            steepness = gradient.norm()
            if steepness > 0:
                momentum = _MOMENTUM * momentum + gradient / steepness
            rate = _FIRST_STEP * (_LAST_STEP / _FIRST_STEP) ** (step / max(1, steps - 1))
            nu = _on_sphere(nu + rate * radius * momentum, k, radius)
            if progress:
                progress(step + 1, steps)
    with evaluation_mode(target.model), torch.no_grad(), vit.with_stream(lambda tokens: noisy(tokens, nu)):
        after = torch.cat([_output(target.predict(batch)) for batch in batches])
    before = torch.cat(plain)
    return Noise(nu, float((after.argmax(1) != before.argmax(1)).double().mean()))


def _output(output: Tensor) -> Tensor:
    """One row per image."""
    return output.flatten(1)


def _answers(plain: list[Tensor], labels: Tensor | None, size: int) -> list[Tensor]:
    if labels is None:
        return [output.argmax(1) for output in plain]
    classes = plain[0].shape[1]
    if not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise ValueError(f"expected labels from 0 to {classes - 1}, got {int(labels.min())} to {int(labels.max())}")
    return list(labels.to(plain[0].device).split(size))


def _on_sphere(nu: Tensor, k: int, radius: float) -> Tensor:
    """The nearest vector with this norm, 0 in channel k, and mean 0."""
    nu = nu.clone()
    nu[k] = 0.0
    nu -= nu.sum() / (len(nu) - 1)
    nu[k] = 0.0
    norm: Tensor = nu.norm()
    return nu * (radius / norm)
