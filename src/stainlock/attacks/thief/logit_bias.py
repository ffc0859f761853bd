"""The last layer's biases: set to zero, or recomputed so that no class is favoured.

An internal lock drowns the logits in a bias. Trained biases there are small, so a thief loses little without them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.changes import edited, last_layer
from stainlock.attacks.pixels import Pictures
from stainlock.network.network import input_of
from stainlock.target import Target, evaluation_mode, synthetic_inputs

PROBES = 16


def without_bias(target: Target) -> Target:
    def change(model: nn.Module) -> None:
        _biased(model).bias.zero_()

    return edited(target, change)


def recentred(target: Target, pixels: Pictures) -> Target:
    """A copy whose logits average 0 over these inputs."""
    name, _ = last_layer(target.model)
    _biased(target.model)
    with evaluation_mode(target.model), torch.no_grad():
        given = torch.cat([input_of(target, name, batch) for batch in pixels.split(16)])

    def change(model: nn.Module) -> None:
        layer = _biased(model)
        layer.bias.copy_(-(given @ layer.weight.T).flatten(0, -2).mean(0))

    return edited(target, change)


def _biased(model: nn.Module) -> nn.Linear:
    _, layer = last_layer(model)
    if layer.bias is None:
        raise NotApplicable("needs a last layer with biases, but this one has none")
    return layer


def _on(inputs: Callable[[Subject], Pictures]) -> Callable[[Subject, Strength], Attacked]:
    def run(subject: Subject, strength: Strength) -> Attacked:
        return Attacked(recentred(subject.target, inputs(subject)))

    return run


def _zero(subject: Subject, strength: Strength) -> Attacked:
    return Attacked(without_bias(subject.target))


def _synthetic(subject: Subject) -> Tensor:
    return synthetic_inputs(subject.target, PROBES, subject.randomness.noise("recentring"))


ATTACKS = (
    Attack("zero-logit-bias", "thief", ("lock",), "nothing", ("zero",), _zero, "set the last layer's biases to zero"),
    Attack("recentre-logits", "thief", ("lock",), "nothing", ("synthetic",), _on(_synthetic),
           "choose the last layer's biases so that synthetic inputs favour no class"),
    Attack("recentre-logits-on-images", "thief", ("lock",), "images", ("images",), _on(Subject.need_images),
           "choose the last layer's biases so that the thief's images favour no class"),
)  # fmt: skip
