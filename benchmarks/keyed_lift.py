"""What a thief gains from a file by fine-tuning, against the same network from random weights.

He has the file without its gates and some labelled images, trains all layers, and begins batch norms anew (γ = 1,
β = 0) or not: the better of the two counts. Lift is his accuracy less that from random weights, with the same labels,
steps and rates, on images that neither has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock import Target
from stainlock.target import evaluation_mode
from zoo_data import SHARED

BATCH = 64
RATES = (0.05,)


@dataclass(frozen=True)
class Split:
    """A thief's labelled images of CIFAR-10, and others to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def lift_rows(
    target: Target, starts: dict[str, Callable[[int], Target]], images: Split, steps: int, keys: int
) -> Iterator[tuple[str, float]]:
    """For random weights and each start, given a seed: its accuracy after fine-tuning, mean over seeds."""
    for start, begin in {"random weights": lambda seed: random_weights(target, seed), **starts}.items():
        found = []
        for seed in range(1, keys + 1):
            given = begin(seed)
            ways = [given] if start == "random weights" else [given, with_new_norms(given)]
            found.append(
                max(
                    accuracy(tuned(own, *images.train, steps, rate, seed), *images.test)
                    for own in ways
                    for rate in RATES
                )
            )
        yield start, sum(found) / len(found)


def random_weights(target: Target, seed: int) -> Target:
    """The same architecture as PyTorch begins it, from a seed."""
    fresh = target.copy()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in fresh.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return fresh


def with_new_norms(target: Target) -> Target:
    """Batch norms that begin anew; everything else as the file has it."""
    fresh = target.copy()
    for module in fresh.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.reset_parameters()
    return fresh


def tuned(target: Target, images: Tensor, labels: Tensor, steps: int, rate: float, seed: int) -> Target:
    """Trained further, all layers, by SGD with momentum and a falling rate."""
    student = target.copy()
    student.model.requires_grad_(True).train()
    optimiser = torch.optim.SGD(student.model.parameters(), rate, 0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randperm(len(images), generator=generator)[:BATCH]
        batch = images[chosen]
        flipped = torch.rand(len(batch), generator=generator) < 0.5
        batch[flipped] = batch[flipped].flip(-1)
        loss = F.cross_entropy(student.predict(batch), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    student.model.eval()
    return student


def accuracy(target: Target, images: Tensor, labels: Tensor) -> float:
    with evaluation_mode(target.model), torch.inference_mode():
        right = [target.predict(x).argmax(1) == y for x, y in zip(images.split(250), labels.split(250), strict=True)]
    return float(torch.cat(right).float().mean())


def split(labels: int) -> Split:
    """The test images, and up to 1500 that the owner may have trained on, are for testing."""
    with np.load(SHARED / "data" / "cifar10.npz") as arrays:
        own, marks = torch.from_numpy(arrays["train_images"]), torch.from_numpy(arrays["train_labels"]).long()
        others, answers = torch.from_numpy(arrays["test_images"]), torch.from_numpy(arrays["test_labels"]).long()
    rest = slice(max(labels, len(own) - 1500), None)
    test = torch.cat([others, own[rest]]).float() / 255, torch.cat([answers, marks[rest]])
    return Split((own[:labels].float() / 255, marks[:labels]), test)
