"""Top-1 and top-5 accuracy of a classifier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.data import Data, Progress
from stainlock.errors import FileError, ModelError
from stainlock.target import Target, check_target, entries_in, evaluation_mode, logits_in


@dataclass(frozen=True)
class Evaluation:
    """Accuracy as a fraction of 1.

    >>> found = sl.evaluate(target, sl.Tensors(images, labels))
    >>> found.metric, found.images, 0 <= found.value <= found.top5 <= 1
    ('top1', 4, True)
    """

    metric: str
    value: float
    images: int
    top5: float


def evaluate(
    target: Target,
    data: Data,
    *,
    batch_size: int = 32,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Accuracy on labelled images; the model is left in the mode it was in.

    >>> original, protected = (sl.evaluate(one, sl.Tensors(images, labels)) for one in (target, stained))
    >>> original.images == protected.images == 4
    True
    """
    check_target(target)
    if data.labels is None:
        raise FileError("accuracy needs labels: put a labels.csv (file,class_index) beside the images")
    score = Score(data.labels)
    with evaluation_mode(target.model), torch.inference_mode():
        for pixels, labels in data.batches(target, batch_size=batch_size, limit=limit, progress=progress):
            assert labels is not None  # data with labels has them in every batch
            score.add(target.predict(pixels), labels)
    return score.evaluation()


class Score:
    """Counts hits batch by batch; ``labels`` are all labels, which are checked against the number of classes."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = labels
        self.images = self.first = self.top_five = 0

    def add(self, output: object, labels: Tensor) -> None:
        logits = classifier_logits(output, len(labels))
        if self.images == 0:
            _check_labels(self.labels, logits.shape[1])
        hits = _hits(logits, labels.to(logits.device))
        self.first += int(hits[:, 0].sum())
        self.top_five += int(hits.sum())
        self.images += len(labels)

    def evaluation(self) -> Evaluation:
        if self.images == 0:
            raise FileError("accuracy needs at least one image, got none")
        return Evaluation("top1", self.first / self.images, self.images, self.top_five / self.images)


def classifier_logits(output: object, count: int | None = None) -> Tensor:
    """The logits in a model's output; an error if it is not a classifier's output for ``count`` images."""
    output = logits_in(output)
    if not isinstance(output, Tensor) or output.dim() != 2 or count not in (None, len(output)):
        came = f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(
            f"accuracy needs a classifier's logits ({count or 'images'}, classes), the model returned {came}"
            f"{_names(output)}"
        )
    return output


def _names(output: object) -> str:
    names = [name for name, _ in entries_in(output)]
    return f" of {', '.join(names)}: name one with --output (in Python Target(output=...))" if names else ""


def _check_labels(labels: list[int], classes: int) -> None:
    if min(labels) < 0 or max(labels) >= classes:
        outside = sum(not 0 <= label < classes for label in labels)
        raise ValueError(
            f"expected labels from 0 to {classes - 1}, as the model has {classes} classes, "
            f"got {outside} of {len(labels)} outside (up to {max(labels)}): check labels.csv or the model"
        )


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """(N, 5) bool: is the label the first, second, ... guess? Always False for images with a NaN logit."""
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return (guesses == labels[:, None]) & ~logits.isnan().any(dim=1, keepdim=True)
