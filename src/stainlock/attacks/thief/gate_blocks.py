"""What a thief sees of the gates in a model: its squeeze-and-excite blocks, and which of them this software inserted.

Everything is found from the model's structure; no key is used.
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
from stainlock.locks.parts.route import remembered
from stainlock.network.network import Block, Network, analyse, input_of
from stainlock.network.ops import Activation
from stainlock.numerics import exact
from stainlock.target import Target, evaluation_mode, synthetic_inputs

PROBES = 8


@dataclass(frozen=True)
class Gates:
    """One block by its layers' names; ``shift``, if there is one, adds to the channels after the gates."""

    first: str
    second: str
    shift: str | None
    gate: Activation


@dataclass(frozen=True)
class Behind:
    """The layers behind an inserted block (R outputs in all), and batch-norm statistics of their inputs and outputs."""

    name: str  # the module behind the block
    taps: Tensor  # (R, C): response to a constant input of 1, i.e. the sum of each kernel
    white: Tensor  # (R, C): output variance due to a white input of variance 1
    mean: Tensor  # of each input channel, before the gates
    deviation: Tensor
    gates: Tensor  # the gates' values while locked, from their biases alone
    signed: bool  # whether gates can be negative
    norms: tuple[str, ...]  # the batch norm behind each layer, by its name in the model without blocks
    running_mean: Tensor | None  # None if a layer has no batch norm
    running_var: Tensor | None  # including ε

    @property
    def energies(self) -> Tensor:
        """(R, C): output variance due to an input of variance 1, halfway between white and constant inputs."""
        return (self.white + self.taps.square()) / 2

    def expect(self, model: nn.Module, mean: Tensor) -> None:
        """Writes these as running means into the batch norms of a model without the blocks."""
        if self.norms:
            running: list[Any] = [model.get_submodule(name).running_mean for name in self.norms]
            for own, part in zip(running, mean.split([len(own) for own in running]), strict=True):
                own.copy_(part)


def find_gates(target: Target) -> list[Gates]:
    """Every block of the network, both its own and inserted ones."""
    network = _analysed(target)
    return [
        Gates(network.name(b.first), network.name(b.second), None if b.shift is None else network.name(b.shift),
              b.gate)
        for b in network.blocks.values()
    ]  # fmt: skip


def _analysed(target: Target) -> Network:
    if Structure.of(target) is not None:
        raise NotApplicable("a keyed lock's gates are not squeeze-and-excite blocks: see remove-gates")
    return analyse(target)


def new_blocks(model: nn.Module) -> list[str]:
    """Modules with an inserted block before them; its parameter names give it away."""
    found = [name for name, module in model.named_modules() if isinstance(module, Gated)]
    if not found:
        raise NotApplicable("no squeeze-and-excite block was inserted into this model")
    return found


def readers_behind(network: Network) -> dict[str, tuple[Block, list[fx.Node]]]:
    """Every inserted block by the name of the module behind it, with the layers that read its output."""
    found = {}
    wanted = {f"{name}.gate.fc2": name for name in new_blocks(network.target.model)}
    for block in network.blocks.values():
        if (second := network.name(block.second)) in wanted:
            found[wanted[second]] = block, list(block.output.users)
    return found


def layers_behind(target: Target) -> list[Behind]:
    """The layers behind each inserted block, in the network's order.

    The moments of a block's input are derived from batch norms, assuming Gaussian channels. If that is not possible,
    they are measured on synthetic inputs, although earlier gates are still locked then.
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
            deviation, block.gate.function(exact(network.part.leaf(block.second), "bias")), block.gate.keeps_zero,
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
    """A copy without the inserted blocks; each channel is multiplied by its gain, given the block's name."""
    network = _analysed(target)
    blocks, stolen = readers_behind(network), target.copy()
    with torch.no_grad():
        for name, (_, readers) in blocks.items():
            for reader in readers:
                weight: Any = stolen.model.get_submodule(network.name(reader)).weight
                gain = torch.as_tensor(gains(name), dtype=weight.dtype).expand(weight.shape[1])
                weight.mul_(gain.view(1, -1, *(1,) * (weight.dim() - 2)))
    for name in sorted(blocks, key=lambda name: -name.count(".")):  # innermost modules first
        gated: Any = stolen.model.get_submodule(name)
        set_submodule(stolen.model, name, gated.layer)
    return replace(stolen, insertions=())
