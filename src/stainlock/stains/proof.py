"""How many triggers a proof by outputs takes, and what it is worth when all of them are given their class.

A trigger is given its class by chance at a rate of at least r = max(1/C, 1/(m + 1)): C classes, of which one was drawn,
and m variants of the trigger that could be given the class as well. N triggers prove at most p = r^N.
"""

from __future__ import annotations

import math

import torch

from stainlock.network.object_detectors import class_count
from stainlock.target import Target, evaluation_mode, running_on
from stainlock.tensors import logits_in
from stainlock.transmission.look_alikes import count_of

LEVEL = 1e-6  # the significance that verification promises
_FOR_DETECTORS = 16  # boxes can't be made any class: some triggers will miss theirs
_UNKNOWN_CLASSES = 1000
_FEW_CLASSES = 20


def rate(target: Target) -> float:
    """The least rate at which a trigger is given its class by chance."""
    return max(1 / (1 + count_of(target.input_shape[0])), 1 / classes_of(target))


def worth(target: Target, count: int) -> float:
    """log10 of the p-value when all triggers are given their class, and no variant is."""
    return count * math.log10(rate(target))


def triggers_needed(target: Target) -> int:
    """How many triggers reach the level when all of them hit."""
    return math.ceil(math.log(LEVEL) / math.log(rate(target)) - 1e-9)


def usual_count(target: Target, *, robust: bool = False) -> int:
    """Twice what would do if all hit: of some triggers, variants that look alike are given the class as well.

    Of robust triggers more are, blurred ones above all: with few classes, where rates are high, it is three times.
    """
    if target.normalises:
        return _FOR_DETECTORS
    needed = triggers_needed(target)
    return 3 * needed if robust and classes_of(target) <= _FEW_CLASSES else 2 * needed


def classes_of(target: Target) -> int:
    """How many classes the model tells apart."""
    if target.normalises:
        return max(2, (class_count(target.model) or _UNKNOWN_CLASSES) - 1)
    grey = torch.full((1, *target.input_shape), sum(target.bounds) / 2)
    with evaluation_mode(target.model), torch.no_grad(), running_on(target):
        output = logits_in(target.predict(grey))
    return max(2, int(output.shape[1])) if isinstance(output, torch.Tensor) and output.dim() == 2 else _UNKNOWN_CLASSES
