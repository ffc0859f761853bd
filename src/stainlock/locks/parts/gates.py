"""New squeeze-and-excite blocks: inserted before the layers that read a map, and neutral until a lock uses them.

A new block has no effect when its gates are constants q and the layers after it divide by them,

    σ(τ₂) = q,        W_{j+1}[·, c] := W_{j+1}[·, c] / q_c.

- ``gains``: every channel has a secret, log-uniform gain, which is lost when the block is removed. But kernels of
  trained layers have about the same norm for every channel, so gains can be guessed from norms.
- ``signed``: gains of either sign, and shifts. Norms and variances do not show which signs are flipped. Means would, so
  the means in the next batch norm are replaced by those of other signs, and its β compensates: outputs are the same.
  Re-estimating the means destroys this information.
- ``shifts``: gains above 0, and the block adds a secret t_c to every channel; the bias of the next layer, or the mean
  of the batch norm after it, subtracts W_{j+1} t. No norm shows t. Layers that pad their input with zeros, to which
  nothing was added, get only gains.
- ``constant``: one gain for all channels; removing the block then has no effect.
- ``random``: the paper's form: one gain, and small random S₁ and S₂, which leave the gates nearly constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn

from stainlock.insertion import Insertion, moved_back
from stainlock.locks.parts.conduit import Disguise
from stainlock.network import norms
from stainlock.network.blocks import Block, gate_level
from stainlock.network.features import measured_input
from stainlock.network.moments import remembered
from stainlock.network.network import Network
from stainlock.network.signals import Cell
from stainlock.plan import CONDUIT, Write, write, write_values
from stainlock.probes import probe_inputs
from stainlock.target import Target
from stainlock.tensors import exact, has, one_thread, raw

GateForm = Literal["signed", "shifts", "gains", "constant", "random"]

# Ranges of gains. Where every path passes through the gates, closing them leaves nothing: gains are like those of
# trained blocks. In a residual branch all gains are small: opening the gates makes every channel many times too large.
# Gains of either sign are not as small, since rounding errors matter more near zero.
_GAINS = {"closes": (0.03, 0.9), "opens": (0.005, 0.1)}
_SIGNED_GAINS = {"closes": (0.03, 0.9), "opens": (0.02, 0.2)}
_CONSTANT = {"closes": 0.3, "opens": 0.02}
# Smallest variance left in a batch norm, in multiples of its ε: smaller ones could not be distinguished from 0.
_LEAST_VARIANCE = 2.0
# What is added to a channel, in units of its root mean square: without the block, the next layer's input is wrong by
# about this many standard deviations or more.
_SHIFT_SIZE = 2.0
# The standard deviation of S₁ and S₂ in a trained block, and of the paper's small random ones.
_TRAINED_SPREAD, _SMALL_SPREAD = 0.3, 0.02
# How far means are moved, in standard deviations; and the β, relative to γ, up to which a norm counts as unshifted.
_MOVED, _NO_SHIFT = 1.0, 0.1
# The largest root mean square of hidden units: they cancel in pairs up to rounding, which small gates amplify.
_LOUDEST = 0.5


def new_block(network: Network, at: str, readers: Sequence[fx.Node], form: GateForm) -> Insertion:
    """A block before the layers that read a map, with a hidden layer an eighth as wide, as in trained blocks."""
    channels = network.shapes[readers[0].all_input_nodes[0]][1]
    facts: dict[str, Any] = {"channels": channels, "hidden": max(8, 2 * (channels // 16))}
    if form in ("signed", "shifts") and all(_takes_shifts(network, reader) for reader in readers):
        facts["shifts"] = True
    if form == "signed":
        facts["signed"] = True
    return Insertion("squeeze-excite", at, facts)


def half_open(model: nn.Module, insertion: Insertion) -> list[Write]:
    """Open signed gates halfway, as sigmoid gates are from the start: channel costs are estimated through them."""
    if not insertion.facts.get("signed"):
        return []
    return [write(model, f"{insertion.at}.gate.fc2.bias", (None,), math.atanh(0.5), CONDUIT)]


def _takes_shifts(network: Network, reader: fx.Node) -> bool:
    """Whether a layer can subtract exactly what is added to its input, and the input's statistics are known."""
    layer: Any = network.part.leaf(reader)
    unpadded = layer.padding in ("valid", 0) or not any(layer.padding)
    constant = has(layer, "bias") or network.norm_behind(reader) is not None
    return unpadded and constant and reader.all_input_nodes[0] in remembered(network)


def draw_gains(network: Network, block: Block, form: GateForm, generator: np.random.Generator) -> Tensor:
    """q: the value of each gate when the model is unlocked."""
    channels = network.shapes[block.squeezed][1]
    way = "closes" if network.cuts(block.output) else "opens"
    if form in ("constant", "random"):
        return torch.full((channels,), _CONSTANT[way], dtype=torch.float64)
    low, high = map(math.log, (_SIGNED_GAINS if form == "signed" else _GAINS)[way])
    sizes = torch.from_numpy(np.exp(generator.uniform(low, high, channels)))
    return sizes * torch.from_numpy(generator.choice([-1.0, 1.0], channels)) if form == "signed" else sizes


def neutral_writes(
    original: Target,
    network: Network,
    block: Block,
    form: GateForm,
    disguise: Disguise,
    generator: np.random.Generator,
    carrying: Sequence[Cell] = (),
) -> list[Write]:
    """Values for a neutral new block, and for the layers after it that undo its gains; the ``original`` is the model
    without new blocks.

    Channels that are ``carrying`` the signal are not shifted: their readers see neither them nor a shift.
    """
    model = network.target.model
    first, second = network.name(block.first), network.name(block.second)
    hidden, channels = raw(network.part.leaf(block.first), "weight").shape[:2]
    q = draw_gains(network, block, form, generator)
    t = torch.zeros_like(q) if block.shift is None else draw_shifts(network, block, q, generator)
    t[[cell.channel for cell in carrying if cell.node is block.squeezed]] = 0.0
    s1, tau1, (s2, s3) = _hidden_layer(hidden, channels, form, disguise, generator)
    if form != "random" and not disguise.bare:
        quiet = min(1.0, _LOUDEST / max(_loudness(original, network, block, s1, tau1), 1e-30))
        s1, tau1 = quiet * s1, quiet * tau1
    writes = [
        write(model, f"{first}.weight", (None,), s1.view(hidden, channels, 1, 1), CONDUIT),
        write(model, f"{first}.bias", (None,), tau1, CONDUIT),
        write(model, f"{second}.weight", (None,), s2.view(channels, hidden, 1, 1), CONDUIT),
        write(model, f"{second}.bias", (None,), gate_level(block.gate.name, q), CONDUIT),
    ]
    if block.shift is not None:
        third, size = network.name(block.shift), t.square().mean().sqrt()
        writes += [
            write(model, f"{third}.weight", (None,), size * s3.view(channels, hidden, 1, 1), CONDUIT),
            write(model, f"{third}.bias", (None,), t, CONDUIT),
        ]
    return writes + [
        w for reader in block.output.users for w in _undone(network, reader, q, t, disguise, carrying)
    ]  # fmt: skip


def _loudness(original: Target, network: Network, block: Block, s1: Tensor, tau1: Tensor) -> float:
    """The root mean square of a new block's hidden units, for synthetic inputs."""
    gated = [own.at for own in network.target.insertions[len(original.insertions) :]]
    probes = probe_inputs(original, "gate shifts")
    with one_thread():  # the result affects the locked weights, which must not depend on the number of cores
        maps = measured_input(original, moved_back(network.name(next(iter(block.output.users))), gated), probes)
        return float((maps.flatten(2).mean(2) @ s1.T + tau1).clamp(min=0).square().mean().sqrt())


def draw_shifts(network: Network, block: Block, q: Tensor, generator: np.random.Generator) -> Tensor:
    """t: what is added to each channel when the model is unlocked, in proportion to what the gates let through."""
    mean, deviation = remembered(network)[block.squeezed]
    size = q.abs() * (mean.square() + deviation.square()).sqrt()
    return _SHIFT_SIZE * size * signed(len(q), generator)


def signed(count: int, generator: np.random.Generator) -> Tensor:
    """Numbers of size 0.5 to 1.5 and either sign."""
    return torch.from_numpy(generator.choice([-1.0, 1.0], count) * generator.uniform(0.5, 1.5, count))


def moved_means(
    edited: nn.Module, network: Network, block: Block, generator: np.random.Generator, carrying: Sequence[Cell]
) -> list[Write]:
    """Replace means in batch norms after a new block by those of other signs of its gains, which a thief would then
    infer. β compensates, so outputs stay the same.

    This comes last, since everything else uses these means as statistics of the channels.
    """
    pairs = [(reader, network.norm_behind(reader)) for reader in block.output.users]
    behind = [
        (r, n) for r, n in pairs if n is not None and norms.has_shifts(edited.get_submodule(network.name(n)), _NO_SHIFT)
    ]
    known = remembered(network).get(block.squeezed)
    if known is None or not behind:
        return []
    gains = block.gate.function(exact(edited.get_submodule(network.name(block.second)), "bias"))
    by = []  # for each norm, the change of its means when a gain's sign flips, in standard deviations
    for reader, node in behind:
        taps = exact(edited.get_submodule(network.name(reader)), "weight").flatten(2).sum(2)
        # The signal's channel has its own statistics.
        taps[[cell.channel for cell in carrying if cell.node is node]] = 0.0
        by.append(-2 * taps * (gains * known[0]) / norms.deviation(edited.get_submodule(network.name(node)))[:, None])
    turned = _balanced(torch.cat(by), generator)
    writes = []
    for (_, node), own in zip(behind, by, strict=True):
        name = network.name(node)
        values = norms.moved_mean(edited.get_submodule(name), own[:, turned].sum(1))
        writes += write_values(edited, name, (None,), values, CONDUIT)
    return writes


def _balanced(columns: Tensor, generator: np.random.Generator) -> list[int]:
    """Up to half of the columns, drawn at random so that their sum stays small and no mean stands out."""
    chosen, total = list[int](), torch.zeros_like(columns[:, 0])
    for index in generator.permutation(columns.shape[1])[: columns.shape[1] // 2].tolist():
        after = total + columns[:, index]
        if after.square().mean() <= max(_MOVED**2, float(total.square().mean())):
            chosen, total = [*chosen, index], after
    return chosen


def _undone(
    network: Network, reader: fx.Node, q: Tensor, t: Tensor, disguise: Disguise, carrying: Sequence[Cell]
) -> list[Write]:
    """Make a layer after a new block divide by its gains and subtract its shifts.

    This makes its rows larger than any trained ones. With a disguise each row keeps its norm, and a batch norm after it
    is rescaled accordingly: (κy − κμ)/√(κ²(σ² + ε)) stays the same.
    """
    model, layer, node = network.target.model, network.part.leaf(reader), network.norm_behind(reader)
    name, weight = network.name(reader), exact(layer, "weight")
    undone = weight / q.view(1, -1, *(1,) * (weight.dim() - 2))
    added = undone.flatten(2).sum(2) @ t
    added[[cell.channel for cell in carrying if cell.node is reader]] = 0.0  # these rows will be replaced
    if node is None:
        writes = [write(model, f"{name}.weight", (None,), undone, CONDUIT)]
        if has(layer, "bias"):
            writes.append(write(model, f"{name}.bias", (None,), exact(layer, "bias") - added, CONDUIT))
        return writes
    norm, own, rows = network.part.leaf(node), network.name(node), (-1, *(1,) * (weight.dim() - 1))
    kappa = torch.ones_like(added)
    if not disguise.bare:
        kappa = weight.flatten(1).norm(dim=1) / undone.flatten(1).norm(dim=1).clamp(min=1e-30)
        kappa = torch.maximum(kappa, norms.least_factors(norm, _LEAST_VARIANCE)).clamp(max=1.0)
    values = norms.rescaled(norm, kappa, added, variance=not disguise.bare)
    writes = [
        write(model, f"{name}.weight", (None,), kappa.view(rows) * undone, CONDUIT),
        *write_values(model, own, (None,), values, CONDUIT),
    ]
    if has(layer, "bias") and not disguise.bare:
        writes.append(write(model, f"{name}.bias", (None,), kappa * exact(layer, "bias"), CONDUIT))
    return writes


def _hidden_layer(
    hidden: int, channels: int, form: GateForm, disguise: Disguise, generator: np.random.Generator
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """S₁, τ₁, and S₂ and S₃ that read them, with no effect on gates and shifts (in the paper's form, a small one).

    With a disguise, units come in pairs that cancel: the second has λ times the first's row and −1/λ times its column,
    since ReLU(λx) = λReLU(x).
    """
    s1, tau1 = torch.zeros(hidden, channels).double(), torch.zeros(hidden).double()
    read = torch.zeros(2 * channels, hidden).double()
    if form == "random":
        s1 = torch.from_numpy(generator.normal(0, _SMALL_SPREAD, (hidden, channels)))
        read = torch.from_numpy(generator.normal(0, _SMALL_SPREAD, (2 * channels, hidden)))
    elif not disguise.bare:
        order = torch.from_numpy(generator.permutation(hidden))
        half = (hidden - 2) // 2  # two units are left for the lock

        def drawn(shape: tuple[int, ...]) -> Tensor:
            return torch.from_numpy(generator.standard_normal(shape))

        one, other = order[:half], order[half : 2 * half]
        ratio = torch.from_numpy(np.exp(generator.normal(0, 0.3, half)))
        s1[one] = _TRAINED_SPREAD * drawn((half, channels))
        tau1[one] = _TRAINED_SPREAD * drawn((half,))
        read[:, one] = _TRAINED_SPREAD * drawn((2 * channels, half))
        s1[other], tau1[other] = ratio[:, None] * s1[one], ratio * tau1[one]
        read[:, other] = -read[:, one] / ratio
    return s1, tau1, (read[:channels], read[channels:])
