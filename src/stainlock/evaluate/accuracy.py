"""Top-1 and top-5 accuracy of a classifier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.errors import FileError, ModelError
from stainlock.evaluate.data import Data, Progress
from stainlock.target import Target, evaluation_mode


@dataclass(frozen=True)
class Evaluation:
    """How well a model does, as fractions of 1."""

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
    """Accuracy on labelled images; the model is left in the mode it was in."""
    if data.labels is None:
        raise FileError("accuracy needs labels: put a labels.csv (file,class_index) beside the images")
    first = top_five = images = 0
    with evaluation_mode(target.model), torch.inference_mode():
        for pixels, labels in data.batches(target, batch_size, limit, progress):
            assert labels is not None  # data with labels has them in every batch
            logits = _logits(target.predict(pixels), len(labels))
            if images == 0:
                _check_labels(data.labels, logits.shape[1])
            hits = _hits(logits, labels.to(logits.device))
            first += int(hits[:, 0].sum())
            top_five += int(hits.sum())
            images += len(labels)
    if images == 0:
        raise FileError("accuracy needs at least one image, got none")
    return Evaluation("top1", first / images, images, top_five / images)


def _logits(output: object, count: int) -> Tensor:
    if not isinstance(output, Tensor) or output.dim() != 2 or len(output) != count:
        came = f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(f"accuracy needs a classifier's logits ({count}, classes), the model returned {came}")
    return output


def _check_labels(labels: list[int], classes: int) -> None:
    if min(labels) < 0 or max(labels) >= classes:
        outside = sum(not 0 <= label < classes for label in labels)
        raise ValueError(
            f"expected labels from 0 to {classes - 1}, as the model has {classes} classes, "
            f"got {outside} of {len(labels)} outside (up to {max(labels)}): check labels.csv or the model"
        )


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """(N, 5) bool: is the label the first, second, ... guess? Never where a logit is NaN."""
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return (guesses == labels[:, None]) & ~logits.isnan().any(dim=1, keepdim=True)
