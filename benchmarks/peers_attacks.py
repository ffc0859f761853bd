"""Attacks on every marked model of `peers.py`: the package's own, and two more.

One only rounds every weight to 8 bits. The other extends the package's permutation and rescaling of channels to those
that several layers write, which the package leaves alone: the channels between the blocks of a CIFAR ResNet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stainlock import Key, Target
from stainlock.attacks import Strength, Subject, all_attacks
from stainlock.attacks.changes import edited, weighted_layers
from stainlock.attacks.paper.fine_tune import BATCH, fine_tuned
from stainlock.numerics import Randomness

SHARES = (0.3, 0.6)
RATES = (1e-3, 1e-2, 3e-2)
STEPS = 200
WHOLE = "the same, and between blocks too"
SPREAD = 0.5  # channels are rescaled by factors exp(SPREAD·N(0, 1))


@dataclass(frozen=True)
class Thief:
    """The attacker, with labelled images other than those that accuracy is measured on. The package's attacks require
    some stain's key besides the model; those used here ignore it."""

    images: Tensor
    labels: Tensor
    key: Key
    seed: int = 0

    def attacks(self) -> dict[str, Callable[[Target], Target]]:
        """The attacks by their names in the table."""
        return {
            "nothing done": lambda target: target,
            **{
                f"{100 * share:.0f} % of each layer's weights pruned, ℓ1": self._made("prune-unstructured", share)
                for share in SHARES
            },
            **{f"all layers fine-tuned, {STEPS} steps of {BATCH}, rate {rate}": self._tuning(rate) for rate in RATES},
            "weights rounded to 8 bits": rounded,
            "int8, PyTorch's static quantisation": self._made("int8-static", 8, self.images),
            "channels inside blocks permuted": self._made("permute-channels", 1.0),
            "the same, and rescaled": self._inside_blocks,
            WHOLE: lambda target: self._between_blocks(self._inside_blocks(target)),
        }

    def _made(self, name: str, strength: Strength, images: Tensor | None = None) -> Callable[[Target], Target]:
        def make(target: Target) -> Target:
            attacked = all_attacks()[name].run(Subject(target, self.key, images, seed=self.seed), strength).target
            assert attacked is not None
            return attacked

        return make

    def _tuning(self, rate: float) -> Callable[[Target], Target]:
        def tune(target: Target) -> Target:
            generator = Randomness(self.seed).noise("fine-tuning")  # the same batches for every mark
            return fine_tuned(target, self.images, self.labels, rate, generator=generator, steps=STEPS)

        return tune

    def _inside_blocks(self, target: Target) -> Target:
        return self._made("rescale-channels", SPREAD)(self._made("permute-channels", 1.0)(target))

    def _between_blocks(self, target: Target) -> Target:
        generator = Randomness(self.seed).noise("between blocks")
        return edited(target, lambda model: rewrite_between_blocks(model, generator))


def rounded(target: Target) -> Target:
    """Round each filter's weights to integer multiples, −127 to 127, of the filter's own step."""

    def change(model: nn.Module) -> None:
        for _, layer in weighted_layers(model):
            weight = layer.get_parameter("weight")
            largest = weight.flatten(1).abs().amax(1).clamp(min=1e-30)
            step = (largest / 127).view(-1, *(1,) * (weight.dim() - 1))
            weight.copy_((weight / step).round() * step)

    return edited(target, change)


@dataclass(frozen=True)
class Channels:
    """Channel i is now what channel ``order[i]`` was, times ``factors[i]``."""

    order: Tensor
    factors: Tensor

    @classmethod
    def drawn(cls, count: int, generator: torch.Generator) -> Channels:
        return cls(torch.randperm(count, generator=generator), _factors(count, generator))

    def widened(self, generator: torch.Generator) -> Channels:
        """After a shortcut that adds new channels on both sides of the old: only the new ones are shuffled."""
        count, quarter = 2 * len(self.order), len(self.order) // 2
        order = torch.arange(count)
        order[quarter:-quarter] = quarter + self.order
        new = torch.cat([order[:quarter], order[-quarter:]])
        shuffled = new[torch.randperm(len(new), generator=generator)]
        order[:quarter], order[-quarter:] = shuffled[:quarter], shuffled[quarter:]
        factors = _factors(count, generator)
        factors[quarter:-quarter] = self.factors
        return Channels(order, factors)

    def written(self, convolution: nn.Module, norm: nn.Module) -> None:
        for tensor in (*convolution.parameters(), *norm.parameters(), norm.running_mean, norm.running_var):
            assert isinstance(tensor, Tensor)
            tensor.copy_(tensor[self.order])
        for tensor in norm.parameters():
            tensor.mul_(self.factors)

    def read(self, layer: nn.Module) -> None:
        weight = layer.get_parameter("weight")
        weight.copy_(weight[:, self.order] / self.factors.view(1, -1, *(1,) * (weight.dim() - 2)))


def _factors(count: int, generator: torch.Generator) -> Tensor:
    return torch.exp(SPREAD * torch.randn(count, generator=generator))


def rewrite_between_blocks(model: Any, generator: torch.Generator) -> None:
    """Permute and rescale all channels between a CIFAR ResNet's blocks; the network computes the same."""
    channels = Channels.drawn(model.conv1.out_channels, generator)
    channels.written(model.conv1, model.bn1)
    for block in (*model.layer1, *model.layer2, *model.layer3):
        channels.read(block.conv1)
        channels = channels.widened(generator) if block.stride == 2 else channels
        channels.written(block.conv2, block.bn2)
    channels.read(model.linear)
