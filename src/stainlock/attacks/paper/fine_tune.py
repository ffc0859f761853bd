"""Fine-tuning on the thief's labelled images: all layers, the last one, or the last one after a reset."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock.attacks.attack import Attack, Attacked, Progress, Strength, Subject, number
from stainlock.attacks.changes import corollary, last_layer
from stainlock.attacks.pixels import Pictures
from stainlock.network.network import input_of
from stainlock.target import Target, evaluation_mode

BATCH = 32
EPOCHS, MOST_STEPS = 3, 300  # for all layers; whichever is fewer
HEAD_EPOCHS = 60  # for the last layer, whose inputs are computed once
MOMENTUM, DECAY = 0.9, 5e-4


def trained(
    parameters: list[nn.Parameter],
    loss: Callable[[Tensor], Tensor],
    examples: int,
    rate: float,
    steps: int,
    *,
    generator: torch.Generator,
    clip: float | None = None,
    progress: Progress | None = None,
) -> None:
    """SGD with momentum and a cosine schedule; ``loss`` takes a random batch of indices. Clears gradients."""
    optimiser = torch.optim.SGD(parameters, rate, MOMENTUM, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with torch.enable_grad():
        for step in range(steps):
            own = loss(torch.randperm(examples, generator=generator)[:BATCH])
            optimiser.zero_grad()
            own.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimiser.step()
            schedule.step()
            if progress is not None:
                progress(step + 1, steps)
    optimiser.zero_grad()


def fine_tuned(
    target: Target,
    images: Pictures,
    labels: Tensor,
    rate: float,
    *,
    generator: torch.Generator,
    steps: int | None = None,
    gently: bool = False,
    progress: Progress | None = None,
) -> Target:
    """A copy with all layers trained further, in training mode.

    ``gently`` trains in evaluation mode and clips gradients: in training mode, a batch norm would scale a silent
    detector's channel to unit variance, and the signal with it.
    """
    tuned = target.copy()
    parameters = list(tuned.model.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    wanted = steps or min(MOST_STEPS, EPOCHS * math.ceil(len(images) / BATCH))

    def loss(chosen: Tensor) -> Tensor:
        return F.cross_entropy(tuned.predict(images[chosen]), labels[chosen].to(tuned.device))

    with torch.random.fork_rng(devices=[]):
        if not gently:
            torch.default_generator.manual_seed(int(torch.randint(2**31, (), generator=generator)))  # for dropout
        tuned.model.train(not gently)
        trained(parameters, loss, len(images), rate, wanted, generator=generator, clip=1.0 if gently else None,
                progress=progress)  # fmt: skip
    tuned.model.eval()
    return tuned


def retrained_head(
    target: Target, images: Pictures, labels: Tensor, rate: float, *, generator: torch.Generator, anew: bool
) -> Target:
    """A copy with only the last layer trained, from its current weights or (``anew``) from random ones."""
    tuned = target.copy()
    name, layer = last_layer(tuned.model)
    with evaluation_mode(tuned.model), torch.no_grad():
        features = torch.cat([input_of(tuned, name, batch) for batch in images.split(64)]).detach()
    if anew:
        bound = 1 / math.sqrt(layer.in_features)
        with torch.no_grad():
            layer.weight.copy_(bound * (2 * torch.rand(layer.weight.shape, generator=generator) - 1))
            if layer.bias is not None:
                layer.bias.zero_()

    def loss(chosen: Tensor) -> Tensor:
        return F.cross_entropy(layer(features[chosen]), labels[chosen].to(tuned.device))

    steps = HEAD_EPOCHS * math.ceil(len(images) / BATCH)
    trained(list(layer.parameters()), loss, len(features), rate, steps, generator=generator)
    return tuned


def _all(subject: Subject, strength: Strength) -> Attacked:
    images, labels = subject.need_labels()
    generator = subject.randomness.noise(f"fine-tuning {strength}")
    tuned = fine_tuned(subject.target, images, labels, number(strength), generator=generator, progress=subject.progress)
    return Attacked(tuned, figures=corollary(subject, tuned))


def _last(subject: Subject, strength: Strength) -> Attacked:
    images, labels = subject.need_labels()
    generator = subject.randomness.noise(f"last layer {strength}")
    return Attacked(retrained_head(subject.target, images, labels, number(strength), generator=generator, anew=False))


def _anew(subject: Subject, strength: Strength) -> Attacked:
    images, labels = subject.need_labels()
    generator = subject.randomness.noise(f"last layer anew {strength}")
    return Attacked(retrained_head(subject.target, images, labels, number(strength), generator=generator, anew=True))


BOTH = ("stain", "lock")
ATTACKS = (
    Attack("fine-tune-all", "paper", BOTH, "labels", (1e-4, 1e-3, 1e-2, 3e-2), _all,
           "fine-tune all layers; strength is the learning rate"),
    Attack("fine-tune-last", "paper", BOTH, "labels", (1e-3, 1e-2, 1e-1), _last,
           "fine-tune the last layer; strength is the learning rate"),
    Attack("retrain-last", "paper", BOTH, "labels", (1e-2, 1e-1), _anew,
           "reset and retrain the last layer; strength is the learning rate"),
)  # fmt: skip
