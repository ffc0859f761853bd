"""How many triggers a proof by outputs needs, and the p-value it reaches if all of them get their class.

By chance a trigger gets its class at a rate of at least r = max(1/C, 1/(m + 1)). One of C classes was drawn, and m
look-alikes of the trigger might get the class as well. The p-value of N triggers is r^N at best.
"""

from __future__ import annotations

import math

import torch

from stainlock.network.object_detectors import class_count
from stainlock.target import Target, evaluation_mode, logits_in, running_on
from stainlock.transmission.look_alikes import count_of

LEVEL = 1e-6  # verification's significance level
_FOR_DETECTORS = 16  # triggers; an object detector's boxes can't be given every class, so some triggers miss
_UNKNOWN_CLASSES = 1000  # assumed if the number of classes can't be found
_FEW_CLASSES = 20


def rate(target: Target) -> float:
    """The lowest rate at which a trigger gets its class by chance."""
    return max(1 / (1 + count_of(target.input_shape[0])), 1 / classes_of(target))


def worth(target: Target, count: int) -> float:
    """log10 of the p-value if every trigger gets its class and no look-alike does."""
    return count * math.log10(rate(target))


def triggers_needed(target: Target) -> int:
    """The number of triggers that reach `LEVEL` if all of them hit."""
    return math.ceil(math.log(LEVEL) / math.log(rate(target)) - 1e-9)


def usual_count(target: Target, *, robust: bool = False) -> int:
    """Twice the number needed if all hit, since for some triggers look-alikes get the class as well.

    With robust triggers more look-alikes do, mostly blurred ones. With few classes, where rates are high, robust stains
    take three times the number.
    """
    if target.normalises:
        return _FOR_DETECTORS
    needed = triggers_needed(target)
    return 3 * needed if robust and classes_of(target) <= _FEW_CLASSES else 2 * needed


def classes_of(target: Target) -> int:
    """The number of classes that the model distinguishes."""
    if target.normalises:
        return max(2, (class_count(target.model) or _UNKNOWN_CLASSES) - 1)
    grey = torch.full((1, *target.input_shape), sum(target.bounds) / 2)
    with evaluation_mode(target.model), torch.no_grad(), running_on(target):
        output = logits_in(target.predict(grey))
    return max(2, int(output.shape[1])) if isinstance(output, torch.Tensor) and output.dim() == 2 else _UNKNOWN_CLASSES
