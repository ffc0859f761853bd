"""Tracing coalitions of clients after every collusion attack, followed by pruning, 8 bits or fine-tuning."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients_leaker import STEPS
from clients_million import Found, trace_all
from clients_models import Model, header, row
from stainlock.attacks import all_collusions
from stainlock.attacks.collusion.coalition import Collusion
from stainlock.attacks.paper.fine_tune import fine_tuned
from stainlock.fingerprints import read
from stainlock.numerics import Randomness
from stainlock.plan import Plan, Replacement

PRUNED = 0.5
_AT_ONCE = 1 << 19  # weights merged at a time, to limit memory
Then = Callable[[Tensor], Tensor]


def _pruned(tensor: Tensor) -> Tensor:
    sizes = tensor.abs().flatten()
    return torch.where(tensor.abs() < sizes.kthvalue(max(1, int(PRUNED * len(sizes)))).values, 0.0, tensor)


def _eight_bits(tensor: Tensor) -> Tensor:
    """Rounding as in PyTorch and ONNX Runtime: symmetric, one scale per row."""
    step = tensor.abs().flatten(1).amax(1).clamp(min=1e-30).view(-1, *(1,) * (tensor.dim() - 1)) / 127
    return (tensor / step).round() * step


AFTERWARDS: dict[str, Then] = {"": lambda tensor: tensor, "pruned": _pruned, "int8": _eight_bits}


def coalitions(models: list[Model], sizes: list[int], names: list[str], clients: int, pieces: int) -> list[str]:
    """Print the tables; return the goals missed.

    Every file is traced as a whole among all clients, and ``pieces`` random halves of it among a tenth of them.
    """
    missed = []
    for model in models:
        kinds = [(name, size, what) for name in names for size in sizes for what in AFTERWARDS]
        readings = _readings(model, sizes, names)
        whole = [readings[kind].sum(0, dtype=np.float64) for kind in kinds]
        found = dict(zip(kinds, trace_all(np.stack(whole), [size for _, size, _ in kinds], clients), strict=True))
        print(
            f"\n{model.name}, amplitude {model.layout.amplitude:g}: members named from the file as it is / with half of"
        )
        print("its weights pruned / in 8 bits. In brackets, over these three files: the smallest |z| of a member, and")
        print(f"the smallest of the largest |z|. {clients} clients were tested.\n")
        header("collusion", *(f"{size} members" for size in sizes))
        for name in names:
            row(name, *(_cell([found[name, size, what] for what in AFTERWARDS]) for size in sizes))
        missed += [f"{model.name}, {name} of {size} {what}: {why}" for (name, size, what), one in found.items()
                   for why in _missed(name, what, one, size)]  # fmt: skip
        missed += _halves(model.name, readings, clients // 10, pieces)
    return missed


def _readings(model: Model, sizes: list[int], names: list[str]) -> dict[tuple[str, int, str], NDArray[np.float32]]:
    """The contribution of each tensor of every coalition's file to the reading: ``(tensors, chips)``."""
    shape = (len(model.weights), model.chips)
    found = {(n, size, what): np.zeros(shape, np.float32) for n in names for size in sizes for what in AFTERWARDS}
    for size in sizes:
        for number, name in enumerate(model.weights):
            for collusion, tensor in _merged(model, name, size, names):
                for what, then in AFTERWARDS.items():
                    own = read({name: then(tensor)}, model.weights, model.only(name))
                    found[collusion.name, size, what][number] = own.chips
            gc.collect()
    return found


def _halves(
    name: str, readings: dict[tuple[str, int, str], NDArray[np.float32]], clients: int, pieces: int
) -> list[str]:
    """Trace files that keep each tensor with probability one half only; return the goals missed."""
    random = np.random.default_rng(0)
    found: list[Found] = []
    for _ in range(pieces):
        kept = [own[random.random(len(own)) < 0.5].sum(0, dtype=np.float64) for own in readings.values()]
        found += trace_all(np.stack(kept), [size for _, size, _ in readings], clients)
    wrong, someone = sum(one.innocents > 0 for one in found), sum(one.members > 0 for one in found)
    print(f"\n{len(found)} files that keep a random half of the tensors, each traced among {clients} clients:")
    print(f"{someone} name a member, {wrong} an innocent client")
    return [f"{name}: {wrong} of {len(found)} traces named an innocent"] if wrong else []


def _merged(model: Model, name: str, size: int, names: list[str]) -> Iterator[tuple[Collusion, Tensor]]:
    """One tensor of the coalition's file, for every collusion; computed a few rows at a time to save memory.

    All copies here have the same channel order, so aligning them first would change nothing.
    """
    held = torch.stack([model.copied(name, client).float() for client in range(size)])
    rows = max(1, _AT_ONCE // max(1, held[0][0].numel()))
    for collusion in (all_collusions()[one] for one in names):
        parts = [
            collusion.merge(held[:, start : start + rows], Randomness(0).noise(f"{collusion.name} {name}"))
            for start in range(0, held.shape[1], rows)
        ]
        yield collusion, torch.cat(parts)


def _cell(found: list[Found]) -> str:
    named = " / ".join(f"{one.members}" + (f" **{one.innocents} innocent**" if one.innocents else "") for one in found)
    sizes = [np.abs(one.scores) for one in found]
    return f"{named} ({min(z.min() for z in sizes):.1f} to {min(z.max() for z in sizes):.1f})"


def _missed(name: str, what: str, found: Found, size: int) -> list[str]:
    return [
        *(["no member named"] if found.members == 0 else []),
        *([f"{found.members} named"] if name == "average" and not what and size <= 50 and found.members < size else []),
        *([f"{found.innocents} innocents"] if found.innocents else []),
    ]


def tuned_coalitions(model: Model, sizes: list[int], names: list[str], clients: int) -> list[str]:
    """Collusion, then fine-tuning of all layers. Print the table; return the goals missed."""
    print(f"\n{model.name}: collusion, then fine-tuning of all layers, {STEPS[model.name]} steps at 1e−3;")
    print(f"{model.performance(model.base):.1f} before, {model.images} images. {clients} clients were tested.\n")
    header("collusion", "members", "performance of the file", "fine-tuned", "members named (smallest and largest |z|)")
    missed: list[str] = []
    pixels, labels = (part[: model.thief] for part in model.data)
    done, readings = [], []
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
            done.append((name, size, model.performance(target), model.performance(tuned)))
            readings.append(model.read(tuned.model.state_dict()).chips)
    traces = trace_all(np.stack(readings), [size for _, size, *_ in done], clients)
    for (name, size, before, after), found in zip(done, traces, strict=True):
        row(name, size, f"{before:.1f}", f"{after:.1f}", _cell([found]))
        missed += [f"{model.name}, {name} of {size} fine-tuned: {why}" for why in _missed(name, "t", found, size)]
    return missed
