"""What a thief sees of the gates in a model: squeeze-and-excite blocks, and which of them were put in by this software.

The structure tells: nothing here looks into a key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from stainlock.attacks.attack import NotApplicable
from stainlock.insertion import Gated, moved_back, set_submodule
from stainlock.locks.keyed import Structure
from stainlock.network.blocks import Block
from stainlock.network.features import input_of
from stainlock.network.moments import remembered
from stainlock.network.network import Network, analyse
from stainlock.probes import synthetic_inputs
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import exact

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
    """The layers behind a new block, R outputs in all, and what batch norms remember of their inputs and outputs."""

    name: str  # of the module that the block stands before
    taps: Tensor  # (R, C): what a constant input gives
    white: Tensor  # (R, C): the share in an output's variance of a white input of variance 1
    mean: Tensor  # of each input, before the gates
    deviation: Tensor
    gates: Tensor  # what the locked gates' biases say
    signed: bool  # whether gates can turn a channel's sign
    norms: tuple[str, ...]  # behind each layer, by their names without the blocks
    running_mean: Tensor | None  # None where a layer has no batch norm
    running_var: Tensor | None  # with ε

    @property
    def energies(self) -> Tensor:
        """(R, C): the share in an output's variance of an input of variance 1, between white and constant ones."""
        return (self.white + self.taps.square()) / 2

    def expect(self, model: nn.Module, mean: Tensor) -> None:
        """Make these the means that the batch norms remember, in a model without the blocks."""
        if self.norms:
            running: list[Any] = [model.get_submodule(name).running_mean for name in self.norms]
            for own, part in zip(running, mean.split([len(own) for own in running]), strict=True):
                own.copy_(part)


def find_gates(target: Target) -> list[Gates]:
    """Every block of the network, its own and new ones."""
    network = _analysed(target)
    return [
        Gates(network.name(b.first), network.name(b.second), None if b.shift is None else network.name(b.shift),
              b.gate.name)
        for b in network.blocks.values()
    ]  # fmt: skip


def _analysed(target: Target) -> Network:
    if Structure.of(target) is not None:
        raise NotApplicable("a keyed lock's gates are no squeeze-and-excite blocks: see remove-gates")
    return analyse(target)


def new_blocks(model: nn.Module) -> list[str]:
    """Modules with a block of ours before them: a file says so by names no trained model has."""
    found = [name for name, module in model.named_modules() if isinstance(module, Gated)]
    if not found:
        raise NotApplicable("no squeeze-and-excite block was put into this model")
    return found


def readers_behind(network: Network) -> dict[str, tuple[Block, list[fx.Node]]]:
    """Every new block by the module it stands before, with the layers that read what comes out of it."""
    found = {}
    wanted = {f"{name}.gate.fc2": name for name in new_blocks(network.target.model)}
    for block in network.blocks.values():
        if (second := network.name(block.second)) in wanted:
            found[wanted[second]] = block, list(block.output.users)
    return found


def layers_behind(target: Target) -> list[Behind]:
    """What stands behind each new block, in the network's order.

    Batch norms tell the moments of what a block is given, as if channels were Gaussian; where none does, synthetic
    inputs stand in, though with gates that are wrong.
    """
    network = _analysed(target)
    known, blocks, found = remembered(network), readers_behind(network), []
    for at, (block, readers) in blocks.items():
        mean, deviation = known[block.squeezed] if block.squeezed in known else _measured(target, at)
        kernels = [exact(network.part.leaf(reader), "weight").flatten(2) for reader in readers]
        norms = [norm for reader in readers if (norm := network.norm_behind(reader)) is not None]
        leaves: list[Any] = [network.part.leaf(norm) for norm in norms] if len(norms) == len(readers) else []
        found.append(Behind(
            at, torch.cat([own.sum(2) for own in kernels]), torch.cat([own.square().sum(2) for own in kernels]), mean,
            deviation, block.gate.function(exact(network.part.leaf(block.second), "bias")), block.gate.name == "tanh",
            tuple(moved_back(network.name(norm), list(blocks)) for norm in norms) if leaves else (),
            torch.cat([exact(leaf, "running_mean") for leaf in leaves]) if leaves else None,
            torch.cat([exact(leaf, "running_var") + float(leaf.eps) for leaf in leaves]) if leaves else None,
        ))  # fmt: skip
    return found


def _measured(target: Target, at: str) -> tuple[Tensor, Tensor]:
    pixels = synthetic_inputs(target, PROBES, torch.Generator().manual_seed(0))
    with evaluation_mode(target.model), torch.no_grad():
        given = input_of(target, at, pixels).double().transpose(0, 1).flatten(1).cpu()
    return given.mean(1), given.std(1)


def taken_out(target: Target, gains: Callable[[str], Tensor | float]) -> Target:
    """A copy without the new blocks: instead, each channel is multiplied by the gain for its block's name."""
    network = _analysed(target)
    blocks, stolen = readers_behind(network), target.copy()
    with torch.no_grad():
        for name, (_, readers) in blocks.items():
            for reader in readers:
                weight: Any = stolen.model.get_submodule(network.name(reader)).weight
                gain = torch.as_tensor(gains(name), dtype=weight.dtype).expand(weight.shape[1])
                weight.mul_(gain.view(1, -1, *(1,) * (weight.dim() - 2)))
    for name in sorted(blocks, key=lambda name: -name.count(".")):  # what is inside another block's module comes first
        gated: Any = stolen.model.get_submodule(name)
        set_submodule(stolen.model, name, gated.layer)
    return replace(stolen, insertions=())
