"""The score of one leaker after various treatments of the leaked file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from clients_models import CLIENTS, Model, header, row, traced
from stainlock import Target, lock
from stainlock.attacks import NotApplicable, all_attacks
from stainlock.attacks.paper.fine_tune import fine_tuned
from stainlock.fingerprints.tracing import log10_p_value

State = Mapping[str, Any]
Treatment = Callable[[Model, Target], "tuple[Target | None, State]"]
ATTACKS: tuple[tuple[str, float], ...] = (
    ("fp16", 16), ("bf16", 16), ("int8-dynamic", 8), ("int8-static", 8), ("onnx", 1), ("onnx-int8-static", 8),
    ("prune-unstructured", 0.3), ("prune-unstructured", 0.5), ("prune-unstructured", 0.7), ("prune-structured", 0.1),
    ("perturb", 0.1), ("perturb", 0.3), ("permute-channels", 1.0), ("rescale-channels", 1.0), ("dummy-neurons", 0.1),
    ("fold-batch-norm", 1), ("fine-tune-last", 0.01),
)  # fmt: skip
STEPS = {"resnet50": 4, "efficientnet_lite0": 12, "vit_cifar10_torchvision": 100}  # fine-tuning steps


def leaker(models: list[Model], word: str) -> list[str]:
    """Print a table per model, of the treatments whose names contain ``word``; return the goals missed."""
    missed = []
    for model in models:
        copied, before = model.copy(0), model.performance(model.base)
        print(f"\n{model.name}: {model.layout.weights} marked weights, {before:.1f} before, {model.images} images\n")
        header("treatment", "performance", "weights compared", "z", "log10 p", "others named")
        treatments = [(f"{name} {s:g}", partial(_attacked, name, s)) for name, s in ATTACKS] + OTHERS
        for label, treat in ((label, treat) for label, treat in treatments if word in label):
            try:
                left, state = treat(model, copied)
            except NotApplicable as why:
                row(label, f"not applicable: {str(why)[:60]}", "", "", "", "")
                continue
            reading = model.read(state, blind=label.startswith("blind"))
            found = traced(reading, 1)
            after = None if left is None else model.performance(left)
            z = max((a.z for a in found.accused if a.client == 0), default=float(found.scores[0]))
            log10 = log10_p_value(z, CLIENTS)
            others = sum(a.client != 0 for a in found.accused)
            share = 100 * reading.compared / reading.carrying
            row(label, "–" if after is None else f"{after:.1f}", f"{share:.0f} %", f"{z:.1f}", f"{log10:.0f}", others)
            if label.startswith("blind"):
                continue  # weaker without the base: no goal
            if (after is None or after >= before - 10) and (log10 > -20 or others):
                missed.append(f"{model.name}, {label}: log10 p = {log10:.1f}, {others} others")
    return missed


def _attacked(name: str, strength: float, model: Model, copied: Target) -> tuple[Target | None, State]:
    left = all_attacks()[name].run(model.subject(copied), strength).target
    assert left is not None
    return left, left.model.state_dict()


def _as_it_is(model: Model, copied: Target) -> tuple[Target | None, State]:
    return copied, copied.model.state_dict()


def _fine_tuned(model: Model, copied: Target) -> tuple[Target | None, State]:
    if model.is_object_detector:
        raise NotApplicable("needs class labels")
    pixels, labels = (part[: model.thief] for part in model.data)
    generator = torch.Generator().manual_seed(0)
    tuned = fine_tuned(copied, pixels, labels, 1e-3, generator=generator, steps=STEPS[model.name], gently=True)
    return tuned, tuned.model.state_dict()


def _locked(model: Model, copied: Target) -> tuple[Target | None, State]:
    """A keyed lock without its key. Its performance is at chance, so it is not measured."""
    return None, lock(copied, seed=0)[0].model.state_dict()


def _stripped(model: Model, copied: Target) -> tuple[Target | None, State]:
    locked, key = lock(copied, seed=0)
    opened = key.revert.apply(locked)
    return opened, opened.model.state_dict()


def _merged(share: float, model: Model, copied: Target) -> tuple[Target | None, State]:
    """The average of the copy and a model fine-tuned from the base (for a detector: the base with noise)."""
    if model.is_object_detector:
        other = all_attacks()["perturb"].run(model.subject(model.base), 0.1).target
        assert other is not None
    else:
        other = model.base.with_model(copy.deepcopy(model.base.model))
        pixels, labels = (part[: model.thief] for part in model.data)
        generator = torch.Generator().manual_seed(1)
        other = fine_tuned(other, pixels, labels, 1e-3, generator=generator, steps=STEPS[model.name], gently=True)
    merged, theirs = copied.copy(), other.model.state_dict()
    with torch.no_grad():
        for name, tensor in merged.model.state_dict().items():
            if tensor.is_floating_point():
                tensor.lerp_(theirs[name], share)
    return merged, merged.model.state_dict()


def _part(model: Model, copied: Target) -> tuple[Target | None, State]:
    """The first half of the tensors under other names, as in a backbone used in another model."""
    state = list(copied.model.state_dict().items())
    return None, {f"encoder.body.{name}": tensor for name, tensor in state[: len(state) // 2]}


def _other_head(model: Model, copied: Target) -> tuple[Target | None, State]:
    state = dict(copied.model.state_dict())
    last = [name for name, tensor in state.items() if tensor.dim() >= 2][-1]
    return None, state | {last: torch.randn(37, *state[last].shape[1:])}


OTHERS: list[tuple[str, Treatment]] = [
    ("as it is", _as_it_is),
    ("fine-tuned, all layers", _fine_tuned),
    ("keyed lock, key unknown", _locked),
    ("keyed lock, stripped", _stripped),
    ("half another model", partial(_merged, 0.5)),
    ("nine tenths another model", partial(_merged, 0.9)),
    ("half of the tensors, renamed", _part),
    ("another head", _other_head),
    ("blind, the base lost", _as_it_is),
]
