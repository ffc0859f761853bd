"""Pruning by ℓ1 norm with `torch.nn.utils.prune`, as in the paper: single weights, or whole rows, of every layer."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import prune

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject, number
from stainlock.attacks.changes import corollary, edited, weighted_layers
from stainlock.numerics import input_axis

SHARES: tuple[Strength, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def _unstructured(subject: Subject, strength: Strength) -> Attacked:
    """Sets the smallest weights of each layer to zero."""

    def change(model: nn.Module) -> None:
        for _, layer in weighted_layers(model):
            method: Any = prune
            method.remove(method.l1_unstructured(layer, "weight", amount=number(strength)), "weight")

    pruned = edited(subject.target, change)
    return Attacked(pruned, figures=corollary(subject, pruned))


def _structured(subject: Subject, strength: Strength) -> Attacked:
    """Sets the channels with the smallest kernels of each layer to zero, except in the last layer."""

    def change(model: nn.Module) -> None:
        for _, layer in weighted_layers(model)[:-1]:
            method: Any = prune
            outputs = 1 - input_axis(layer)
            pruned = method.ln_structured(layer, "weight", amount=number(strength), n=1, dim=outputs)
            method.remove(pruned, "weight")

    pruned = edited(subject.target, change)
    return Attacked(pruned, figures=corollary(subject, pruned))


ATTACKS = (
    Attack("prune-unstructured", "paper", ("stain", "lock"), "nothing", SHARES, _unstructured,
           "set the smallest weights of every layer to zero; strength is the fraction"),
    Attack("prune-structured", "paper", ("stain", "lock"), "nothing", SHARES, _structured,
           "set the channels with the smallest weights of every layer to zero; strength is the fraction"),
)  # fmt: skip
