"""New squeeze-and-excite blocks: put in before the layers that read a map, and neutral until a lock makes use of them.

A block of its own does nothing when its gates are constants q and the layers behind it divide by them,

    σ(τ₂) = q,        W_{j+1}[·, c] := W_{j+1}[·, c] / q_c.

- ``gains``: every channel has a secret gain of its own, log-uniform. Whoever takes the block out has lost the gains;
  but kernels of trained layers have much the same norm for every channel, so that gains can be guessed from it.
- ``signed``: gains of either sign, and shifts. Neither norms nor variances tell which channels are turned round; means
  would, so those that the batch norm behind remembers become the means of other signs, and its β takes the difference,
  which gives the same outputs. Who measures these means again has lost them.
- ``shifts``: gains above 0, and the block also adds a secret number t_c to every channel, which the layer behind
  expects: its bias, or the mean of the batch norm after it, takes W_{j+1} t back. No norm tells of t. Where the layer
  pads its input with zeros, which nothing was added to, there are gains alone.
- ``constant``: one gain for all channels. Taking the block out then does no harm.
- ``random``: the paper's: one gain, and small random S₁ and S₂, so that the gates are nearly constant.
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
from stainlock.tensors import exact, has, raw

GateForm = Literal["signed", "shifts", "gains", "constant", "random"]

# Where all of the network passes the gates, closing them leaves nothing: gains are those of trained blocks. In a
# residual branch they are all far below the middle: opened, they make every channel many times too large.
# Those of either sign have no need to be as small: where they pass zero, rounding counts for more.
_GAINS = {"closes": (0.03, 0.9), "opens": (0.005, 0.1)}
_SIGNED_GAINS = {"closes": (0.03, 0.9), "opens": (0.02, 0.2)}
_CONSTANT = {"closes": 0.3, "opens": 0.02}
# A variance this many times batch norm's ε can still be told from none.
_LEAST_VARIANCE = 2.0
# What is added to a channel, in units of its root mean square: a layer behind that does not expect it is off by so many
# deviations or more.
_SHIFT_SIZE = 2.0
# Of S₁ and S₂ in a trained block, and of the paper's small random ones.
_TRAINED_SPREAD, _SMALL_SPREAD = 0.3, 0.02
# How far means are moved, in deviations of what they are means of; and a β, in units of γ, that is next to none.
_MOVED, _NO_SHIFT = 1.0, 0.1
# The root mean square of hidden units: what pairs of them leave is rounding, which small gates make large.
_LOUDEST = 0.5


def new_block(network: Network, at: str, readers: Sequence[fx.Node], form: GateForm) -> Insertion:
    """A block before the layers that read a map, with a hidden layer an eighth as wide, as trained ones have."""
    channels = network.shapes[readers[0].all_input_nodes[0]][1]
    facts: dict[str, Any] = {"channels": channels, "hidden": max(8, 2 * (channels // 16))}
    if form in ("signed", "shifts") and all(_takes_shifts(network, reader) for reader in readers):
        facts["shifts"] = True
    if form == "signed":
        facts["signed"] = True
    return Insertion("squeeze-excite", at, facts)


def half_open(model: nn.Module, insertion: Insertion) -> list[Write]:
    """Gates that let half of everything through, as those of a sigmoid do from the start: who looks for the channels
    that will be missed least must see the layers behind at work."""
    if not insertion.facts.get("signed"):
        return []
    return [write(model, f"{insertion.at}.gate.fc2.bias", (None,), math.atanh(0.5), CONDUIT)]


def _takes_shifts(network: Network, reader: fx.Node) -> bool:
    """Whether a layer can take back exactly what is added to its input, and batch norms tell how much that may be."""
    layer: Any = network.part.leaf(reader)
    unpadded = layer.padding in ("valid", 0) or not any(layer.padding)
    constant = has(layer, "bias") or network.norm_behind(reader) is not None
    return unpadded and constant and reader.all_input_nodes[0] in remembered(network)


def draw_gains(network: Network, block: Block, form: GateForm, generator: np.random.Generator) -> Tensor:
    """q: what each gate is when the model is unlocked."""
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
    """Values for a new block that does nothing, and the layers behind it that take its gains back; the ``original`` has
    no such block yet.

    Channels that are ``carrying`` the signal are not shifted: who reads them will not see them, nor their shift.
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
    """The root mean square of a new block's hidden units, for inputs that need no data."""
    gated = [own.at for own in network.target.insertions[len(original.insertions) :]]
    probes = probe_inputs(original, "gate shifts")
    maps = measured_input(original, moved_back(network.name(next(iter(block.output.users))), gated), probes)
    return float((maps.flatten(2).mean(2) @ s1.T + tau1).clamp(min=0).square().mean().sqrt())


def draw_shifts(network: Network, block: Block, q: Tensor, generator: np.random.Generator) -> Tensor:
    """t: what is added to each channel when the model is unlocked, of the size of what the gates let through."""
    mean, deviation = remembered(network)[block.squeezed]
    size = q.abs() * (mean.square() + deviation.square()).sqrt()
    return _SHIFT_SIZE * size * signed(len(q), generator)


def signed(count: int, generator: np.random.Generator) -> Tensor:
    """Numbers of about 1, of either sign."""
    return torch.from_numpy(generator.choice([-1.0, 1.0], count) * generator.uniform(0.5, 1.5, count))


def moved_means(
    edited: nn.Module, network: Network, block: Block, generator: np.random.Generator, carrying: Sequence[Cell]
) -> list[Write]:
    """Means that batch norms behind a new block would remember if its gains had other signs; β takes the difference, so
    that the outputs stay. Who reads the signs out of the means reads those.

    This comes last: everything else reads in these numbers what channels are like.
    """
    pairs = [(reader, network.norm_behind(reader)) for reader in block.output.users]
    behind = [
        (r, n) for r, n in pairs if n is not None and norms.has_shifts(edited.get_submodule(network.name(n)), _NO_SHIFT)
    ]
    known = remembered(network).get(block.squeezed)
    if known is None or not behind:
        return []
    gains = block.gate.function(exact(edited.get_submodule(network.name(block.second)), "bias"))
    by = []  # for each norm, what turning each gain would do to its means, in deviations
    for reader, node in behind:
        taps = exact(edited.get_submodule(network.name(reader)), "weight").flatten(2).sum(2)
        taps[[cell.channel for cell in carrying if cell.node is node]] = 0.0  # the signal's own statistics are no one's
        by.append(-2 * taps * (gains * known[0]) / norms.deviation(edited.get_submodule(network.name(node)))[:, None])
    turned = _balanced(torch.cat(by), generator)
    writes = []
    for (_, node), own in zip(behind, by, strict=True):
        name = network.name(node)
        values = norms.moved_mean(edited.get_submodule(name), own[:, turned].sum(1))
        writes += write_values(edited, name, (None,), values, CONDUIT)
    return writes


def _balanced(columns: Tensor, generator: np.random.Generator) -> list[int]:
    """Up to half of the columns, drawn at random, whose sum is small: nothing may stand out."""
    chosen, total = list[int](), torch.zeros_like(columns[:, 0])
    for index in generator.permutation(columns.shape[1])[: columns.shape[1] // 2].tolist():
        after = total + columns[:, index]
        if after.square().mean() <= max(_MOVED**2, float(total.square().mean())):
            chosen, total = [*chosen, index], after
    return chosen


def _undone(
    network: Network, reader: fx.Node, q: Tensor, t: Tensor, disguise: Disguise, carrying: Sequence[Cell]
) -> list[Write]:
    """A layer behind a new block divides by its gains, and takes back what it adds.

    Larger weights would make its rows larger than any trained ones. In disguise each keeps its norm, and the batch norm
    behind it, if there is one, expects so much less: (κy − κμ)/√(κ²(σ² + ε)) is what it was.
    """
    model, layer, node = network.target.model, network.part.leaf(reader), network.norm_behind(reader)
    name, weight = network.name(reader), exact(layer, "weight")
    undone = weight / q.view(1, -1, *(1,) * (weight.dim() - 2))
    added = undone.flatten(2).sum(2) @ t
    added[[cell.channel for cell in carrying if cell.node is reader]] = 0.0  # these rows will be others
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
    """S₁, τ₁ and what reads them, S₂ and S₃, with no effect on gates and shifts, or, in the paper's form, little.

    In disguise the units come in pairs that cancel: the second has the first's row times a number, and its column
    divided by minus that number, since ReLU(λx) = λReLU(x).
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
