"""What a thief gains from a keyed file by fine-tuning, against the same network from random weights.

He has the file without its gates and some labelled images, trains all layers, and begins batch norms anew (γ = 1,
β = 0) or not: the better of the two counts. Random weights get two tries as well, as PyTorch begins layers and as He
and others (2015) do, without which deep networks that lack batch norms hardly learn. Lift is the thief's accuracy less
that from random weights, with the same labels, steps and rates, on images that neither has seen. Products are in bf16,
which halves the time; weights, sums and updates stay in float32.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from stainlock import Target
from stainlock.locks.keyed import file_view, lock_keyed
from zoo_data import SHARED

BATCH = 64
RATES = (0.05,)
# Names of the layers to gate, or how `lock_keyed` is asked for them.
PLACEMENTS: dict[str, dict[str, Any]] = {
    "resnet20_cifar10": {
        "all": "all",
        "spread": "spread",
        "every block's second": [f"layer{i}.{j}.conv2" for i in (1, 2, 3) for j in range(3)],
        "one of three": 7,
        "four": 4,
    },
}


def lift_table(name: str, labels: int, steps: int, placements: Sequence[str] = (), seed: int = 1) -> None:
    """Print a row for random weights and one for each placement."""
    target: Target = getattr(zoo, name)()
    known = PLACEMENTS.get(name, {"all": "all", "spread": "spread"})
    train, test = _images(labels)
    print(f"\n{name}, {labels} labels, {steps} steps of {BATCH} images, {len(test[0])} others to test on\n")
    print("| start | gates | accuracy | lift | seconds |\n|---|---|---|---|---|", flush=True)
    base = 0.0
    for start in ("random weights", *(placements or known)):
        begun = time.perf_counter()
        if start == "random weights":
            ways, count = random_weights(target, seed), 0
        else:
            locked, key = lock_keyed(target, gates=known[start], seed=seed)
            ways, count = ways_from(file_view(locked)), len(key.details["gates"])
        best = best_of(ways, train, test, steps, seed)
        base = best if start == "random weights" else base
        took = time.perf_counter() - begun
        print(f"| {start} | {count} | {best:.1%} | {100 * (best - base):+.1f} | {took:.0f} |", flush=True)


Labelled = tuple[Tensor, Tensor]


def best_of(ways: Sequence[Target], train: Labelled, test: Labelled, steps: int, seed: int) -> float:
    """The best accuracy after fine-tuning, of several beginnings."""
    return max(accuracy(tuned(own, *train, steps, rate, seed), *test) for own in ways for rate in RATES)


def random_weights(target: Target, seed: int) -> list[Target]:
    """The same architecture from a seed, as PyTorch begins its layers, and with weights of variance 2 / inputs."""
    usual = target.copy()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in usual.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        he = usual.copy()
        for module in he.model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return [usual, he]


def ways_from(file: Target) -> list[Target]:
    """The file as it is and, where it has batch norms, with these begun anew."""
    has_norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in file.model.modules())
    return [file, with_new_norms(file)] if has_norms else [file]


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
    student.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.SGD(student.model.parameters(), rate, 0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # for dropout
        for _ in range(steps):
            chosen = torch.randperm(len(images), generator=generator)[:BATCH]
            batch = images[chosen]
            flipped = torch.rand(len(batch), generator=generator) < 0.5
            batch[flipped] = batch[flipped].flip(-1)
            with torch.autocast("cpu", torch.bfloat16):
                answers = student.predict(batch)
            loss = F.cross_entropy(answers.float(), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    student.model.eval()
    return student


def accuracy(target: Target, images: Tensor, labels: Tensor) -> float:
    with torch.inference_mode():
        right = [target.predict(x).argmax(1) == y for x, y in zip(images.split(250), labels.split(250), strict=True)]
    return float(torch.cat(right).float().mean())


def _images(labels: int) -> tuple[Labelled, Labelled]:
    """The thief's labelled images, and others: the test images, and up to 1500 that the owner may have trained on."""
    with np.load(SHARED / "data" / "cifar10.npz") as arrays:
        own, marks = torch.from_numpy(arrays["train_images"]), torch.from_numpy(arrays["train_labels"]).long()
        others, answers = torch.from_numpy(arrays["test_images"]), torch.from_numpy(arrays["test_labels"]).long()
    rest = slice(max(labels, len(own) - 1500), None)
    test = torch.cat([others, own[rest]]).float() / 255, torch.cat([answers, marks[rest]])
    return (own[:labels].float() / 255, marks[:labels]), test
