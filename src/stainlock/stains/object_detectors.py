"""Stains in an object detector's boxes: the strongest box on a trigger image has the class it was stained for."""

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
from stainlock.network.ops import clipping_range
from stainlock.target import Target, evaluation_mode

NOTHING = -1  # the label if an object detector finds nothing
_REPORTED = 0.3  # a box of this probability passes every threshold in use
_LEAK = 0.1  # gradient of a clipped activation
_SEEN = 0.01  # change of log odds; smaller ones are rounding errors


class ClassEvidence:
    """How sure an object detector is of each class on fixed images: logits ``(N, C)`` of the best box per class.

    Only boxes that the stain reaches count. The others do not change, whatever is written. The strongest of them, or
    the weakest box that is still reported if that is stronger, takes the place of class 0, the background. So softmax
    is near 1 for a class whose best box is far above all others.
    """

    def __init__(self, stained: Target, images: Tensor) -> None:
        if class_count(stained.model) is None:
            raise SiteError("the output schema needs an object detector whose head states its number of classes")
        self.model: Any = stained.model
        transform: Any = self.model.transform
        with evaluation_mode(self.model), torch.no_grad():
            self.batch, _ = transform(list(images.to(stained.device, stained.dtype)))
        self.seeing: Tensor | None = None  # (N, boxes); None if every box counts
        self.reported = math.log(_REPORTED / (1 - _REPORTED))
        self.rivals = self.inputs.new_full((len(images),), self.reported)

    @property
    def inputs(self) -> Tensor:
        """The backbone's input."""
        inputs: Tensor = self.batch.tensors
        return inputs

    def see(self, silent: Any, *others: Any) -> None:
        """Find out which boxes depend on a layer, from the backbone's outputs with different weights of that layer."""
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
        # The best box's value, but a gradient for all that come close: another box may become the best.
        best = best.detach() + nearly - nearly.detach()
        return torch.cat([self.rivals[:, None], best[:, 1:]], 1)

    def _odds(self, features: Any) -> Tensor:
        """log p/(1−p) of every class in every box: ``(N, boxes, C)``; with two stages, only in the best box."""
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
        if proposals:  # their number differs between images
            odds = torch.stack([own.amax(0, keepdim=True) for own in odds.split([len(p) for p in proposals])])
        return odds


@contextmanager
def leaking_gradients(model: nn.Module) -> Iterator[None]:
    """Let a small gradient through clipped activations, so that what an early step has silenced can come back."""
    clipped = [(module, ends) for module in model.modules() if (ends := clipping_range(module)) is not None]
    try:
        for module, (low, high) in clipped:
            module.forward = partial(_leak, low=low, high=high)
        yield
    finally:
        for module, _ in clipped:
            del module.forward


def _leak(x: Tensor, low: float, high: float) -> Tensor:
    value, leaking = x.clamp(low, high), _LEAK * x
    # Values are clipped; the gradient is 1 inside the range and the leak outside.
    return torch.where(value == x, value, value.detach() + leaking - leaking.detach())


class _Told(Exception):
    """Stops a forward pass after the class logits: boxes need not be selected."""


def has_background(model: nn.Module) -> bool:
    """Softmax over classes and background, as in two-stage object detectors and SSD; others score each class alone."""
    return hasattr(model, "roi_heads") or type(model).__name__ == "SSD"


@contextmanager
def _class_logits(model: Any) -> Iterator[list[Tensor]]:
    """The head's class logits for every box; the model runs no further."""
    caught: list[Tensor] = []
    two_stages = hasattr(model, "roi_heads")
    head = model.roi_heads.box_predictor if two_stages else getattr(model.head, "classification_head", None)
    if head is None:
        raise SiteError("the output schema needs an object detector like torchvision's, with a classification head")

    def catch(_: nn.Module, __: Any, output: Any) -> None:
        caught.append(output[0] if two_stages else output)
        raise _Told

    handle = head.register_forward_hook(catch)
    try:
        yield caught
    finally:
        handle.remove()


def strongest_labels(detections: Any) -> Tensor:
    """The class of each image's strongest box, `NOTHING` if there is none: a black box's answer."""
    labels = []
    for own in detections:
        try:
            scores, found = torch.as_tensor(own["scores"]), torch.as_tensor(own["labels"])
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"expected boxes, scores and labels for each image, from an object detector, got {type(own).__name__}"
            ) from error
        labels.append(int(found[int(scores.argmax())]) if len(scores) else NOTHING)
    return torch.tensor(labels)
