"""What a thief without data gets out of a locked classifier, top-1 in percent: the best of several guesses.

``biases`` are those of the last layer set to zero. ``block out`` takes new blocks out and guesses one gain for all
their channels; ``norms`` guesses the gains from the norms of the next layer's kernels, times one number for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import zoo
from stainlock import Key, Target, lock
from stainlock.target import evaluation_mode

GATES = {"kind": "squeeze-excite", "blocks": "inserted"}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("efficientnet_lite0", {"kind": "internal", "obfuscate": False}),
    ("efficientnet_lite0", {"kind": "internal"}),
    ("efficientnet_lite0", {**GATES, "gate_form": "constant"}),
    ("efficientnet_lite0", GATES),
    ("efficientnet_lite0", {**GATES, "gates": 6}),
    ("resnet56_cifar10", GATES),
    ("resnet56_cifar10", {**GATES, "gates": 8}),
    ("vgg16_cifar10", {**GATES, "site": "features.2"}),
    ("vgg16_cifar10", {**GATES, "site": "features.2", "gates": 6}),
)
GUESSES = (0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
IMAGES = 100


def thief_table() -> None:
    print("\n| model | lock | original | locked | unlocked | biases | block out | norms |")
    print("|" + "---|" * 8)
    for name, case in CASES:
        if reason := zoo.missing(name):
            print(f"left out: {reason}", file=sys.stderr)
            continue
        target: Target = getattr(zoo, name)()
        pixels, labels = zoo.natural(name, IMAGES)
        assert labels is not None
        locked, key = lock(target, seed=0, **case)

        right = partial(_right, target.normalise(pixels), labels)
        cells = [
            right(target),
            right(locked),
            _right(key.unlock(pixels), labels, locked),
            right(_without_biases(locked)),
        ]
        cells.append(max(right(_taken_out(locked, key, lambda _, g=guess: g)) for guess in GUESSES))
        cells.append(max(right(_taken_out(locked, key, lambda w, g=guess: g * _by_norms(w))) for guess in GUESSES))
        options = ", ".join(
            str(v) if k == "kind" else f"{k} {v}" for k, v in case.items() if k not in ("blocks", "site")
        )
        print(f"| {name} | {options} | " + " | ".join(f"{value:.0f}" for value in cells) + " |", flush=True)


def _right(inputs: Tensor, labels: Tensor, model: Target) -> float:
    with evaluation_mode(model.model), torch.inference_mode():
        return 100 * float((model(inputs).argmax(1) == labels).double().mean())


def _without_biases(locked: Target) -> Target:
    stolen = locked.copy()
    last: Any = [m for m in stolen.model.modules() if isinstance(m, torch.nn.Linear)][-1]
    last.bias.data.zero_()
    return stolen


def _taken_out(locked: Target, key: Key, gain: Callable[[Tensor], Any]) -> Target:
    """New blocks out, and the next layers' inputs multiplied by what the thief takes for the gains."""
    stolen = locked.copy()
    for at in key.details["inserted"]:
        layer: Any = stolen.model.get_submodule(at).layer
        with torch.no_grad():
            layer.weight *= gain(layer.weight)
        parent, _, own = at.rpartition(".")
        stolen.model.get_submodule(parent)._modules[own] = layer
    return stolen


def _by_norms(weight: Tensor) -> Tensor:
    norms = weight.transpose(0, 1).flatten(1).norm(dim=1)
    return (norms.median() / norms.clamp(min=1e-12)).view(1, -1, 1, 1)
