"""The demonstration's second half: the same model is locked, and unlocked by a patch in the corner."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.evaluation import Images
from stainlock.key import Key
from stainlock.locks import lock
from stainlock.models.class_names import class_names
from stainlock.target import Target, evaluation_mode

SHOWN = 4


@dataclass(frozen=True)
class Answer:
    """A predicted class and its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class LockedPhotograph:
    """A photograph with the patch in place, and the locked model's answers without and with the patch."""

    levels: Tensor
    label: str
    locked: Answer
    unlocked: Answer


@dataclass(frozen=True)
class Locking:
    """Everything the report shows about the lock."""

    model: Target
    key: Key
    seconds: float
    top1: dict[str, float]
    difference: float  # largest, between unlocked and original logits on patched images, relative to the largest logit
    photographs: list[LockedPhotograph]


def lock_and_compare(original: Target, photographs: Images, pixels: Tensor, seed: int | None) -> Locking:
    start = time.perf_counter()
    locked, key = lock(original, kind="keyed", seed=seed)
    seconds = time.perf_counter() - start
    labels = torch.tensor(photographs.labels)
    patched = key.unlock(pixels)
    with evaluation_mode(original.model), torch.inference_mode():
        outputs = {
            "the original": original.predict(pixels),
            "the original, with the patch": original(patched),
            "locked, without the patch": locked.predict(pixels),
            "locked, with the patch": locked(patched),
        }
    reference = outputs["the original, with the patch"]
    difference = float((outputs["locked, with the patch"] - reference).abs().max() / reference.abs().max())
    top1 = {name: float((out.argmax(1) == labels).double().mean()) for name, out in outputs.items()}
    levels = key.detectors[0].trigger.region.paste(key.detectors[0].trigger.levels, original.to_bytes(pixels))
    shown = [
        LockedPhotograph(
            levels[i],
            class_names("imagenet")[int(labels[i])],
            _answer(outputs["locked, without the patch"][i]),
            _answer(outputs["locked, with the patch"][i]),
        )
        for i in range(0, len(labels), len(labels) // SHOWN)
    ][:SHOWN]
    return Locking(locked, key, seconds, top1, difference, shown)


def _answer(logits: Tensor) -> Answer:
    probabilities = logits.softmax(0)
    return Answer(class_names("imagenet")[int(probabilities.argmax())], float(probabilities.max()))
