"""A patch that the thief tries: pasted into his images, and judged without labels.

A model that is open is sure of its answers, and gives different inputs different ones. That is the mutual information
between input and answer, H(mean p) − mean H(p), and needs no label: at most log of the number of classes, and next to
nothing for a locked model, whether it always answers the same or never is sure.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.attack import Change, NotApplicable
from stainlock.network.features import Region
from stainlock.target import Target, evaluation_mode


def information(logits: Tensor) -> Tensor:
    """In nats, over a batch."""
    logs = torch.log_softmax(logits.double(), 1)
    each = -(logs.exp() * logs).sum(1).mean()
    mean = logs.exp().mean(0)
    return -(mean * mean.clamp(min=1e-30).log()).sum() - each


def pasting(patch: Tensor, region: Region) -> Change:
    """``patch`` (C, h, w) in pixels, into its place of every image."""
    return lambda pixels: region.paste(patch.to(pixels), pixels)


def judged(target: Target, pixels: Tensor, change: Change | None = None) -> float:
    with evaluation_mode(target.model), torch.inference_mode():
        logits = target.predict(pixels if change is None else change(pixels))
    check_logits(logits)
    return float(information(logits))


def check_logits(output: object) -> None:
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < 2:
        raise NotApplicable("needs a classifier's logits, and the model returns something else")
