"""Predictions and accuracy of a classifier and many edits of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stainlock.data import Data
from stainlock.errors import FileError
from stainlock.evaluation.accuracy import Evaluation, Score, classifier_logits
from stainlock.evaluation.sharing.outputs import shared_outputs
from stainlock.target import Target


def shared_predictions(original: Target, others: Iterable[Target], data: Data, **options: Any) -> list[Tensor]:
    """Each model's predicted class for each image; options are those of `shared_outputs`."""
    found: list[list[Tensor]] = []
    for outputs, _ in shared_outputs(original, others, data, **options):
        found.append([classifier_logits(output).argmax(1) for output in outputs])
    return [torch.cat(predictions) for predictions in zip(*found, strict=True)]


def shared_evaluations(original: Target, others: Iterable[Target], data: Data, **options: Any) -> list[Evaluation]:
    """The result of `evaluate` for each model; options are those of `shared_outputs`."""
    if data.labels is None:
        raise FileError("accuracy needs labels: put a labels.csv (file,class_index) beside the images")
    scores: list[Score] = []
    for outputs, labels in shared_outputs(original, others, data, **options):
        assert labels is not None  # data with labels has them in every batch
        scores = scores or [Score(data.labels) for _ in outputs]
        for score, output in zip(scores, outputs, strict=True):
            score.add(output, labels)
    return [score.evaluation() for score in scores]
