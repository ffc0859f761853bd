"""Coalitions of clients by every collusion attack, and by pruning, 8 bits and fine-tuning afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from clients_leaker import STEPS
from clients_models import Model, header, row, traced
from stainlock.attacks import all_collusions
from stainlock.attacks.collusion.coalition import Collusion
from stainlock.attacks.paper.fine_tune import fine_tuned
from stainlock.fingerprints import Reading, Trace, read
from stainlock.plan import Plan, Replacement
from stainlock.randomness import Randomness

PRUNED = 0.5
_AT_ONCE = 1 << 19  # weights of all members at once
Then = Callable[[Tensor], Tensor]


def _pruned(tensor: Tensor) -> Tensor:
    sizes = tensor.abs().flatten()
    return torch.where(tensor.abs() < sizes.kthvalue(max(1, int(PRUNED * len(sizes)))).values, 0.0, tensor)


def _eight_bits(tensor: Tensor) -> Tensor:
    """As PyTorch and ONNX Runtime round weights: symmetric, a scale for each row."""
    step = tensor.abs().flatten(1).amax(1).clamp(min=1e-30).view(-1, *(1,) * (tensor.dim() - 1)) / 127
    return (tensor / step).round() * step


AFTERWARDS: dict[str, Then] = {"": lambda tensor: tensor, "pruned": _pruned, "int8": _eight_bits}


def coalitions(models: list[Model], sizes: list[int], names: list[str]) -> list[str]:
    """Prints the tables; returns what was missed."""
    missed = []
    for model in models:
        print(f"\n{model.name}: members named, of those there are; least |z| of a member in the first round. No")
        print("innocent of 1000 was named unless it is said. Threshold and p-values are for 1,000,000 clients.\n")
        header("collusion", "members", *(what or "as it is" for what in AFTERWARDS))
        for size in sizes:
            merged = {name: {what: np.zeros(model.chips) for what in AFTERWARDS} for name in names}
            for name in model.weights:
                for collusion, tensor in _merged(model, name, size, names):
                    for what, then in AFTERWARDS.items():
                        own = read({name: then(tensor)}, model.weights, model.only(name))
                        merged[collusion.name][what] += own.chips
                gc.collect()
            for name, by_what in merged.items():
                found = {what: _traced(model, chips, size) for what, chips in by_what.items()}
                row(name, size, *(_cell(one, size) for one in found.values()))
                missed += [f"{model.name}, {name} of {size} {what}: {why}" for what, one in found.items()
                           for why in _missed(name, what, one, size)]  # fmt: skip
    return missed


def _merged(model: Model, name: str, size: int, names: list[str]) -> Iterator[tuple[Collusion, Tensor]]:
    """One tensor of the coalition's file, for every collusion; rows at a time, since copies are many.

    Copies are in one order here, so that to align them first changes nothing.
    """
    held = torch.stack([model.copied(name, client).float() for client in range(size)])
    rows = max(1, _AT_ONCE // max(1, held[0][0].numel()))
    for collusion in (all_collusions()[one] for one in names):
        parts = [
            collusion.merge(held[:, start : start + rows], Randomness(0).noise(f"{collusion.name} {name}"))
            for start in range(0, held.shape[1], rows)
        ]
        yield collusion, torch.cat(parts)


def _traced(model: Model, chips: np.ndarray, size: int) -> Trace:
    return traced(Reading(chips, model.layout.weights, model.layout.weights, {}), size)


def _named(found: Trace, size: int) -> tuple[int, int]:
    members = sum(a.client < size for a in found.accused)
    return members, len(found.accused) - members


def _cell(found: Trace, size: int) -> str:
    members, innocents = _named(found, size)
    least = f"{members} of {size}, {np.abs(found.scores[:size]).min():.1f}"
    return least + (f", **{innocents} innocent**" if innocents else "")


def _missed(name: str, what: str, found: Trace, size: int) -> list[str]:
    members, innocents = _named(found, size)
    return [
        *(["no member named"] if members == 0 else []),
        *([f"{members} named"] if name == "average" and not what and size <= 50 and members < size else []),
        *([f"{innocents} innocents"] if innocents else []),
    ]


def tuned_coalitions(model: Model, sizes: list[int], names: list[str]) -> list[str]:
    """Collusion, then fine-tuning of all layers; prints the table, returns what was missed."""
    print(f"\n{model.name}: collusion, then fine-tuning of all layers, {STEPS[model.name]} steps at 1e−3;")
    print(f"{model.performance(model.base):.1f} before, {model.images} images\n")
    header("collusion", "members", "performance of the file", "fine-tuned", "members named")
    missed = []
    pixels, labels = (part[: model.thief] for part in model.data)
    for size in sizes:
        files: dict[str, list[Replacement]] = {name: [] for name in names}
        for name in model.weights:
            for collusion, tensor in _merged(model, name, size, names):
                files[collusion.name].append(Replacement(name, tensor, "collusion"))
        for name, replacements in files.items():
            target = Plan(replacements=tuple(replacements)).apply(model.base)
            generator = torch.Generator().manual_seed(0)
            steps = STEPS[model.name]
            tuned = fine_tuned(target, pixels, labels, 1e-3, generator=generator, steps=steps, gently=True)
            found = traced(model.read(tuned.model.state_dict()), size)
            row(name, size, f"{model.performance(target):.1f}", f"{model.performance(tuned):.1f}", _cell(found, size))
            missed += [f"{model.name}, {name} of {size} fine-tuned: {why}" for why in _missed(name, "t", found, size)]
    return missed
