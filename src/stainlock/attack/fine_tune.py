"""Fine-tuning on the thief's labelled images: of all layers, of the last one, and of a last one begun anew."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.attack.attack import Attack, Attacked, Progress, Strength, Subject, number
from stainlock.attack.changes import corollary, last_layer
from stainlock.sites import input_of
from stainlock.target import Target, evaluation_mode

BATCH = 32
EPOCHS, MOST_STEPS = 3, 300  # of all layers
HEAD_EPOCHS = 60  # of the last one, on features computed once
MOMENTUM, DECAY = 0.9, 5e-4


def fine_tuned(
    target: Target,
    images: Tensor,
    labels: Tensor,
    rate: float,
    *,
    generator: torch.Generator,
    steps: int | None = None,
    progress: Progress | None = None,
) -> Target:
    """A copy trained further, all layers, by SGD with momentum and a falling rate; batch norms in training mode."""
    tuned = target.copy()
    model = tuned.model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    optimiser = torch.optim.SGD(model.parameters(), rate, MOMENTUM, weight_decay=DECAY)
    wanted = steps or min(MOST_STEPS, EPOCHS * math.ceil(len(images) / BATCH))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, wanted)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(int(torch.randint(2**31, (), generator=generator)))  # for dropout
        for step in range(wanted):
            chosen = torch.randperm(len(images), generator=generator)[:BATCH]
            loss = F.cross_entropy(tuned.predict(images[chosen]), labels[chosen].to(tuned.device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if progress is not None:
                progress(step + 1, wanted)
    model.eval()
    for parameter in model.parameters():
        parameter.grad = None
    return tuned


def retrained_head(
    target: Target, images: Tensor, labels: Tensor, rate: float, *, generator: torch.Generator, anew: bool
) -> Target:
    """A copy whose last layer alone was trained, from where it was or from nothing."""
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
    optimiser = torch.optim.SGD(layer.parameters(), rate, MOMENTUM, weight_decay=DECAY)
    steps = HEAD_EPOCHS * math.ceil(len(images) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    with torch.enable_grad():
        for _ in range(steps):
            chosen = torch.randperm(len(features), generator=generator)[:BATCH]
            loss = F.cross_entropy(layer(features[chosen]), labels[chosen].to(tuned.device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
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
           "all layers trained further; strength is the learning rate"),
    Attack("fine-tune-last", "paper", BOTH, "labels", (1e-3, 1e-2, 1e-1), _last,
           "the last layer trained further; strength is the learning rate"),
    Attack("retrain-last", "paper", BOTH, "labels", (1e-2, 1e-1), _anew,
           "the last layer trained from nothing; strength is the learning rate"),
)  # fmt: skip
