"""Stains that show in a detector's boxes: the strongest box on a trigger image is of the class it was stained for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.errors import SiteError
from stainlock.network.object_detectors import class_count
from stainlock.target import Target, evaluation_mode

NOTHING = -1  # the answer of a detector that finds nothing
_REPORTED = 0.3  # the probability of a box that any threshold in use lets through
_LEAK = 0.1
_SEEN = 0.01  # of log odds; less is rounding


class ClassEvidence:
    """How sure a detector is, for fixed images, that a class is on them: logits ``(N, C)`` of its best box for each.

    Only boxes that see an image's stain count. What the others find stays, whatever is written there: the strongest of
    it, or the least that the detector reports, stands in place of class 0, the background. So softmax is near 1 for a
    class whose best box is far above all others.
    """

    def __init__(self, stained: Target, images: Tensor) -> None:
        if class_count(stained.model) is None:
            raise SiteError("the output schema needs a detector whose head says how many classes it knows")
        self.model: Any = stained.model
        transform: Any = self.model.transform
        with evaluation_mode(self.model), torch.no_grad():
            self.batch, _ = transform(list(images.to(stained.device, stained.dtype)))
        self.seeing: Tensor | None = None  # every box, or (N, boxes)
        self.reported = math.log(_REPORTED / (1 - _REPORTED))
        self.rivals = self.inputs.new_full((len(images),), self.reported)

    @property
    def inputs(self) -> Tensor:
        """What the backbone is given."""
        inputs: Tensor = self.batch.tensors
        return inputs

    def see(self, silent: Any, *others: Any) -> None:
        """Find out which boxes see a layer, by the backbone's outputs with different weights there."""
        before = self._odds(silent)
        if hasattr(self.model, "roi_heads"):
            return
        seeing = torch.stack([((self._odds(other) - before).abs() > _SEEN).any(2) for other in others]).any(0)
        if bool(seeing.any(1).all()):
            self.seeing = seeing
            unseeing = before[:, :, 1:].amax(2).masked_fill(seeing, -torch.inf).amax(1)
            self.rivals = unseeing.clamp(min=self.reported)

    def logits(self, features: Any) -> Tensor:
        odds = self._odds(features)
        if self.seeing is not None:
            odds = odds.masked_fill(~self.seeing[:, :, None], -torch.inf)
        best, nearly = odds.amax(1), odds.logsumexp(1)
        # The best box's value, but a gradient to all that come near: another may get further in the end.
        best = best.detach() + nearly - nearly.detach()
        return torch.cat([self.rivals[:, None], best[:, 1:]], 1)

    def _odds(self, features: Any) -> Tensor:
        """log p/(1−p) of every class in every box: ``(N, boxes, C)``; of two stages, in the best box for the class."""
        features = {"0": features} if isinstance(features, Tensor) else features
        model, proposals = self.model, []
        with evaluation_mode(model), _class_logits(model) as caught, suppress(_Told):
            if hasattr(model, "roi_heads"):
                proposals, _ = model.rpn(self.batch, features)
                model.roi_heads(features, proposals, self.batch.image_sizes)
            else:
                model.head(list(features.values()))
        odds = caught[-1]
        if has_background(model):
            log_p = odds.log_softmax(-1)
            odds = log_p - torch.log1p(-log_p.exp().clamp(max=1 - 1e-6))
        if proposals:  # images differ in their number
            odds = torch.stack([own.amax(0, keepdim=True) for own in odds.split([len(p) for p in proposals])])
        return odds


@contextmanager
def leaking_gradients(model: nn.Module) -> Iterator[None]:
    """Gradients pass clipped activations, a little: what an early step has silenced can come back."""
    clipped = [m for m in model.modules() if isinstance(m, nn.ReLU | nn.Hardtanh)]  # ReLU6 is one of the latter
    try:
        for module in clipped:
            low, high = (module.min_val, module.max_val) if isinstance(module, nn.Hardtanh) else (0.0, math.inf)
            module.forward = partial(_leak, low=low, high=high)  # type: ignore[method-assign]
        yield
    finally:
        for module in clipped:
            del module.forward


def _leak(x: Tensor, low: float, high: float) -> Tensor:
    value, leaking = x.clamp(low, high), _LEAK * x
    # Inside, the clip's own gradient and 1; outside the leak: values stay the clip's.
    return torch.where(value == x, value, value.detach() + leaking - leaking.detach())


class _Told(Exception):
    """Stops a forward pass behind the classes: boxes need not be picked."""


def has_background(model: nn.Module) -> bool:
    """Softmax over classes and background, as two-stage detectors and SSD have it; others ask for each class alone."""
    return hasattr(model, "roi_heads") or type(model).__name__ == "SSD"


@contextmanager
def _class_logits(model: Any) -> Iterator[list[Tensor]]:
    """What the head says of the classes of every box; the model runs no further."""
    caught: list[Tensor] = []
    two_stages = hasattr(model, "roi_heads")
    head = model.roi_heads.box_predictor if two_stages else getattr(model.head, "classification_head", None)
    if head is None:
        raise SiteError("the output schema needs a detector like torchvision's, with a classification head")

    def catch(_: nn.Module, __: Any, output: Any) -> None:
        caught.append(output[0] if two_stages else output)
        raise _Told

    handle = head.register_forward_hook(catch)
    try:
        yield caught
    finally:
        handle.remove()


def strongest_labels(detections: Any) -> Tensor:
    """The class of each image's strongest box, `NOTHING` where there is none: what a black box answers."""
    labels = []
    for own in detections:
        try:
            scores, found = torch.as_tensor(own["scores"]), torch.as_tensor(own["labels"])
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"expected a detector's list of boxes, scores and labels, one for each image, got {type(own).__name__}"
            ) from error
        labels.append(int(found[int(scores.argmax())]) if len(scores) else NOTHING)
    return torch.tensor(labels)
