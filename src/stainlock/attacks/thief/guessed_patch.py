"""A patch that the thief tries: pasted into images and judged without labels.

An unlocked model gives confident answers that differ between inputs. The mutual information between input and answer,
H(mean p) − mean H(p), measures this and needs no labels. It is at most the log of the number of classes, and close to
zero for a locked model, which either always answers the same or is never confident.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.attack import Change, NotApplicable
from stainlock.target import Region, Target, evaluation_mode


def information(logits: Tensor) -> Tensor:
    """Mutual information between input and answer over a batch, in nats."""
    logs = torch.log_softmax(logits.double(), 1)
    each = -(logs.exp() * logs).sum(1).mean()
    mean = logs.exp().mean(0)
    return -(mean * mean.clamp(min=1e-30).log()).sum() - each


def pasting(patch: Tensor, region: Region) -> Change:
    """Pastes ``patch`` (C, h, w), in pixels, into the region of every image."""
    return lambda pixels: region.paste(patch.to(pixels), pixels)


def judged(target: Target, pixels: Tensor, change: Change | None = None) -> float:
    with evaluation_mode(target.model), torch.inference_mode():
        logits = target.predict(pixels if change is None else change(pixels))
    check_logits(logits)
    return float(information(logits))


def check_logits(output: object) -> None:
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < 2:
        raise NotApplicable("needs a classifier's logits, but the model returns something else")
