"""What a thief sees of the gates in a model: squeeze-and-excite blocks, and which of them were put in by this software.

The structure tells: nothing here looks into a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attack.attack import NotApplicable
from stainlock.insertion import Gated, set_submodule
from stainlock.lock.missed import remembered
from stainlock.lock.wires import Network
from stainlock.sites import analyse, input_of
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import exact
from stainlock.trigger import synthetic_inputs

PROBES = 8


@dataclass(frozen=True)
class Gates:
    """One block by its layers' names: ``shift`` adds to the channels afterwards, where there is such a layer."""

    first: str
    second: str
    shift: str | None
    gate: str  # of sigmoids, hard-sigmoids or tanhs


@dataclass(frozen=True)
class Behind:
    """A layer behind a new block: its weight (R, C, ...) and what batch norms remember of its input and output."""

    name: str
    weight: Tensor
    mean: Tensor  # of each input, before the gates
    deviation: Tensor
    gates: Tensor  # what the locked gates' biases say
    norm: str | None
    signed: bool  # whether gates can turn a channel's sign
    running_mean: Tensor | None = None
    running_var: Tensor | None = None  # with ε

    @property
    def taps(self) -> Tensor:
        """(R, C): what a constant input gives."""
        return self.weight.flatten(2).sum(2) if self.weight.dim() > 2 else self.weight

    @property
    def energies(self) -> Tensor:
        """(R, C): the share in an output's variance of an input of variance 1, between white and constant ones."""
        white = self.weight.flatten(2).square().sum(2) if self.weight.dim() > 2 else self.weight.square()
        return (white + self.taps.square()) / 2


def find_gates(target: Target) -> list[Gates]:
    """Every block of the network, its own and new ones."""
    network = Network(analyse(target))
    return [
        Gates(network.name(b.first), network.name(b.second), None if b.shift is None else network.name(b.shift),
              b.gate.name)
        for b in network.blocks.values()
    ]  # fmt: skip


def new_blocks(model: nn.Module) -> list[str]:
    """Layers with a block of ours before them: a file says so by names no trained model has."""
    found = [name for name, module in model.named_modules() if isinstance(module, Gated)]
    if not found:
        raise NotApplicable("no squeeze-and-excite block was put into this model")
    return found


def layers_behind(target: Target) -> list[Behind]:
    """What stands behind each new block, in the network's order.

    Batch norms tell the moments of what a block is given, as if channels were Gaussian; where none does, synthetic
    inputs stand in, though with gates that are wrong.
    """
    network = Network(analyse(target))
    known, wanted = remembered(network), set(new_blocks(target.model))
    found = []
    for block in network.blocks.values():
        (reader,) = block.output.users
        at = network.name(reader).removesuffix(".layer")
        if at not in wanted:
            continue
        if block.squeezed in known:
            mean, deviation = known[block.squeezed]
        else:
            mean, deviation = _measured(target, at)
        facts: dict[str, Any] = {"norm": None}
        if (norm := network.norm_behind(reader)) is not None:
            leaf: Any = network.part.leaf(norm)
            facts = {"norm": network.name(norm), "running_mean": exact(leaf, "running_mean"),
                     "running_var": exact(leaf, "running_var") + float(leaf.eps)}  # fmt: skip
        gates = block.gate.function(exact(network.part.leaf(block.second), "bias"))
        facts["signed"] = block.gate.name == "tanh"
        found.append(Behind(at, exact(network.part.leaf(reader), "weight"), mean, deviation, gates, **facts))
    return found


def _measured(target: Target, at: str) -> tuple[Tensor, Tensor]:
    pixels = synthetic_inputs(target, PROBES, torch.Generator().manual_seed(0))
    with evaluation_mode(target.model), torch.no_grad():
        given = input_of(target, at, pixels).double().transpose(0, 1).flatten(1).cpu()
    return given.mean(1), given.std(1)


def taken_out(target: Target, gains: Callable[[str], Tensor | float]) -> Target:
    """A copy without the new blocks: instead, each channel is multiplied by the gain for its layer's name."""
    names = new_blocks(target.model)
    stolen = target.copy()
    with torch.no_grad():
        for name in names:
            gated: Any = stolen.model.get_submodule(name)
            weight: Tensor = gated.layer.weight
            gain = torch.as_tensor(gains(name), dtype=weight.dtype).expand(weight.shape[1])
            weight.mul_(gain.view(1, -1, *(1,) * (weight.dim() - 2)))
            set_submodule(stolen.model, name, gated.layer)
    return replace(stolen, insertions=())
