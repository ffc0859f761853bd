"""Measures of performance: accuracy, average precision, a generator's loss, or how far outputs move.

A measure returns named numbers: `measure` for one model, `six` for the six settings of a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stainlock.evaluation import Data, evaluate
from stainlock.evaluation.settings import SETTINGS, Patched, six_settings
from stainlock.figures.subject import Subject
from stainlock.key import Key
from stainlock.object_detection.coco import CocoImages
from stainlock.object_detection.precision import DetectionEvaluation, evaluate_object_detector
from stainlock.object_detection.settings import six_object_detector_settings
from stainlock.target import Target, evaluation_mode, tensors_in

Numbers = dict[str, float]
_BATCH = 16


class Measure(Protocol):
    """What a figure plots for a model."""

    def measure(self, target: Target) -> Numbers: ...

    def six(self, locked: Target, key: Key) -> dict[str, Numbers]: ...


@dataclass(frozen=True)
class Accuracy:
    """Top-1 on labelled images."""

    data: Data

    def measure(self, target: Target) -> Numbers:
        return {"top-1": evaluate(target, self.data, batch_size=_BATCH).value}

    def six(self, locked: Target, key: Key) -> dict[str, Numbers]:
        found = six_settings(locked, key, self.data, batch_size=_BATCH)
        return {setting: {"top-1": result.value} for setting, result in found.items()}


@dataclass(frozen=True)
class Precision:
    """COCO's AP and AR at IoU 0.5:0.95."""

    data: CocoImages

    def measure(self, target: Target) -> Numbers:
        return self._numbers(evaluate_object_detector(target, self.data))

    def six(self, locked: Target, key: Key) -> dict[str, Numbers]:
        found = six_object_detector_settings(locked, key, self.data)
        return {setting: self._numbers(result) for setting, result in found.items()}

    @staticmethod
    def _numbers(result: DetectionEvaluation) -> Numbers:
        return {"AP": result.value, "AR": result.ar}


CHANGE = "change of outputs"


@dataclass(frozen=True)
class OutputChange:
    """For models without trained weights or data without labels: how far outputs are from the original's.

    This is ‖f − f₀‖ / ‖f₀ − mean f₀‖, with norms over all inputs x and f₀ the original; if the traced part has several
    outputs, the mean over them. It is 0 for the original and about 1 for a model that ignores its input.
    """

    original: Target
    data: Data

    def measure(self, target: Target) -> Numbers:
        return {CHANGE: self._change(target, self.data)}

    def six(self, locked: Target, key: Key) -> dict[str, Numbers]:
        models = {"original": self.original, "edited": key.edited(locked), "locked": locked}
        patched = Patched(self.data, self.original, key.unlock_transform(normalise=False))
        found = {}
        for setting in SETTINGS:
            name = "locked" if setting == "unlocked" else setting.removesuffix("_patch")
            found[setting] = {CHANGE: self._change(models[name], self.data if setting == name else patched)}
        return found

    def _change(self, target: Target, data: Data) -> float:
        ours, theirs = _outputs(target, data), _outputs(self.original, self.data)
        parts = [
            float((a - b).norm() / (b - b.mean(0)).norm().clamp(min=1e-30)) for a, b in zip(ours, theirs, strict=True)
        ]
        return sum(parts) / len(parts)


def _outputs(target: Target, data: Data) -> list[Tensor]:
    """Each output of the traced part, for all inputs."""
    batches: list[list[Tensor]] = []
    with evaluation_mode(target.model), torch.inference_mode():
        for pixels, _ in data.batches(target, batch_size=_BATCH):
            batches.append([output.cpu() for output in tensors_in(target.run_traced(pixels))])
    return [torch.cat(parts).double() for parts in zip(*batches, strict=True)]


def measure_of(subject: Subject) -> Measure:
    """The measure that the setup's metric names."""
    coco = subject.coco
    if subject.setup.metric == "precision" and coco is not None:
        return Precision(coco)
    if subject.setup.metric == "accuracy":
        return Accuracy(subject.images)
    return OutputChange(subject.target, subject.images)
