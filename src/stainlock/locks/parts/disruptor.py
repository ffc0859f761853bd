"""Disruptors: weights that ruin the outputs until the signal restores them, in the logits layer or in gates.

Logits: with bias b, a unit vector u, a strength s and the signal γ that reaches the layer when unlocked,

    bias := su,        column := (b − su)/γ,        so that a signal of γ restores b.

Gates of a squeeze-and-excite block σ(S₂ h(S₁ pool(x) + τ₁) + τ₂): two hidden units make the pooled signal z a step,

    h₁ − h₂ = ρ(Gz − a) − ρ(Gz − a − 1),        0 when locked, 1 when unlocked,

and a shift moves every gate to where it ruins the model, unless the step cancels it:

    τ₂ := τ₂ + shift,        S₂[·, 1] := −shift,        S₂[·, 2] := +shift.

Which shift ruins a model depends on where the block is. If every path passes through it, closed gates leave nothing. In
a residual branch closed gates change little, and the gates of a new block do most damage when they are all open, since
their usual gains are small. Otherwise the shift is chosen by its effect on the outputs for synthetic inputs.

A new block is inserted before the layers that read a map, and is neutral until a lock uses it: its gates are constants
q and the layers after it divide by them,

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

Before a lock is handed out, it is tried on synthetic inputs. With y the outputs of the edited model and ŷ those of the
locked model, on images with the patch

    opens   max |ŷ − y| ≤ 1e−3 · (spread of y over the outputs)

and on plain images, with o the original's outputs and corr the correlation of how outputs vary from image to image

    ruins   |corr(ŷ, o)| ≤ 1/2, or max |ŷ − o| several times the spread of o, as with drowned logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn

from stainlock.errors import ModelError, SiteError
from stainlock.facts import Facts
from stainlock.insertion import Insertion, moved_back
from stainlock.key import Key
from stainlock.locks.parts.conduit import Disguise, Tap
from stainlock.locks.parts.route import Cell, remembered
from stainlock.network import norms
from stainlock.network.network import Block, Network, gate_level, measured_input
from stainlock.numerics import Randomness, exact, has, model_digest, one_thread, raw, sample_sphere
from stainlock.plan import CONDUIT, DISRUPTOR, Plan, Write, write, write_values
from stainlock.target import Target, evaluation_mode, logits_in, probe_inputs, values_to_compare
from stainlock.trigger import Trigger

# --- disruptors -------------------------------------------------------------------------------------------------------

# A typical component of su, in units of the widest range of logits on synthetic inputs: on natural images the range is
# up to four times wider.
_DROWNING = 12.0
# The largest component of u exceeds the next by this much, in units of 1/√c: otherwise the logits would decide between
# two classes, which is above chance if there are few.
_APART = 0.5
_DRAWS = 10_000
# Distance of a locked gate's level from its midpoint, on the wrong side; drawn between this and 1.5 times this.
SHIFT = 4.0
# Factors of that distance for tanh gates: closed near the midpoint, open at less, since tanh saturates sooner.
_SHUT, _OPEN = 1e-5, 0.4
# Distance of a hidden unit from its activation's bend: 1 for ReLU; smooth activations are linear or 0 further out.
_MARGIN, _SMOOTH_MARGIN = 1.0, 16.0
# Fraction of that distance that the disguise may use up on synthetic inputs.
_HEARD = 0.1
# Added to the energy of hidden units, as a fraction of its mean: natural inputs may excite units that are silent here.
_ASLEEP = 0.01
# Tolerance for the signal at a gate, which is 1 up to rounding in half precision.
_STEP_ERROR = 1e-2
# One block's gates ruin the outputs if these correlate by at most this with the edited model's.
_RUINED = 0.1

# Which gates are open and which closed when locked: all open, all closed, or each on its opposite side.
Pattern = Literal["open", "close", "turn"]


def draw_disruption(classes: int, generator: np.random.Generator) -> Tensor:
    """u, uniform on the part of the sphere where one component stands out: the locked model always gives one answer."""
    if classes < 2:
        raise ModelError(f"expected a classifier of at least 2 classes, got {classes}")
    for _ in range(_DRAWS):
        u = sample_sphere(1, classes, generator=generator)[0]
        first, second = u.topk(2).values.tolist()
        if (first - second) * classes**0.5 >= _APART:
            return u
    raise AssertionError("one draw in ten or so stands out")


def logits_range(target: Target) -> float:
    """The widest range between the largest and the smallest logit, on synthetic inputs."""
    with evaluation_mode(target.model), torch.no_grad():
        logits = logits_in(target.predict(probe_inputs(target, "logits"))).double()
    return float((logits.amax(1) - logits.amin(1)).max())


class LogitsDisruptor:
    """The disruptor in the logits layer, which reads the signal by some of its columns."""

    def __init__(self, network: Network, taps: list[Tap]) -> None:
        self.network, self.taps = network, taps
        self.name = network.name(network.logits)
        self.classes = network.shapes[network.logits][1]

    def strength(self, target: Target) -> float:
        """s such that one component of su is several times the range of the logits: their order is then that of su."""
        return _DROWNING * math.sqrt(self.classes) * max(logits_range(target), 1e-6)

    def received(self, target: Target, pixels: Tensor) -> Tensor:
        """The signal that reaches the layer, for each input, in float64: 1 when unlocked, up to rounding."""
        features = measured_input(target, self.name, pixels)
        return sum(
            (tap.share * features[:, tap.cell.channel] for tap in self.taps), torch.zeros(len(features)).double()
        )

    def writes(self, edited: Target, s: float, u: Tensor, gamma: float) -> list[Write]:
        """The bias su, and the columns that restore b for a signal of γ."""
        if not gamma > 0:
            raise ModelError("the signal does not reach the logits: use a site of higher dimension, or a wider type")
        layer = edited.model.get_submodule(self.name)
        b, weight = exact(layer, "bias"), exact(layer, "weight")
        column = (b - s * u) / gamma
        writes = [write(edited.model, f"{self.name}.bias", (None,), s * u, DISRUPTOR)]
        for tap in self.taps:
            own = weight[:, tap.cell.channel] + tap.share * column
            writes.append(write(edited.model, f"{self.name}.weight", (None, tap.cell.channel), own, DISRUPTOR))
        return writes


class GateDisruptor:
    """The disruptor in one block whose map carries the signal: two of its hidden units, and all its gates.

    ``new``: the block was inserted for the lock.
    """

    def __init__(self, network: Network, block: Block, taps: list[Tap], disguise: Disguise, *, new: bool) -> None:
        self.network, self.block, self.taps, self.disguise, self.new = network, block, taps, disguise, new
        self.name = network.name(block.second)
        self.units = self._cheapest_units()
        self.height = self._height()

    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns to try: all closed if nothing bypasses the block, all open if new gates amplify."""
        if self.network.cuts(self.block.output):
            return ("close",)
        return ("open",) if self.new else ("turn", "open", "close")

    def _cheapest_units(self) -> tuple[int, int]:
        """The two hidden units that cost least: those whose columns carry the least energy into the gates."""
        hidden = _given(self.network.target, self.name).square().mean(0)
        hidden += _ASLEEP * hidden.mean() + 1e-12
        columns = exact(self.network.part.leaf(self.block.second), "weight").flatten(1).square().sum(0)
        if len(columns) < 4:
            raise SiteError(f"the block at {self.name} has {len(columns)} hidden units: expected at least 4")
        first, second = (hidden * columns).topk(2, largest=False).indices.tolist()
        return first, second

    def step_writes(self) -> list[Write]:
        """The step's two units, which no gate reads yet."""
        model, first = self.network.target.model, self.network.name(self.block.first)
        weight = raw(self.network.part.leaf(self.block.first), "weight")
        margin, height = _MARGIN if self.block.hidden.is_relu else _SMOOTH_MARGIN, self.height
        row = height * self._quiet(self.disguise.leaking(first, weight, tuple(weight.shape[1:])), margin)
        for tap in self.taps:
            row[tap.cell.channel] = height * (2 * margin + 1) * tap.share
        writes = []
        for unit, start in zip(self.units, (margin, margin + 1), strict=True):
            writes += [
                write(model, f"{first}.weight", (unit,), row, CONDUIT),
                write(model, f"{first}.bias", (unit,), -height * start, CONDUIT),
                *(write(model, f"{name}.weight", (None, unit), 0.0, CONDUIT) for name in self.readers),
            ]
        return writes

    @property
    def readers(self) -> list[str]:
        """The layers that read the hidden units: the gates and, if there are any, the shifts."""
        return [self.network.name(node) for node in (self.block.second, self.block.shift) if node is not None]

    def _quiet(self, leak: Tensor, margin: float) -> Tensor:
        """The disguise, scaled down to use at most a fraction of the margin. Otherwise maps with values in the
        hundreds, as in VGG on pixels up to 255, would drown the signal."""
        if self.disguise.bare:
            return leak
        heard = float((_given(self.network.target, self.network.name(self.block.first)) @ leak.flatten()).abs().max())
        return leak * min(1.0, _HEARD * margin / max(heard, 1e-30))

    def _height(self) -> float:
        """h₁ − h₂ when unlocked: 1 or, with a disguise, the height for which S₁ stands out as little as S₂."""
        if self.disguise.bare or not self.block.hidden.is_relu:
            return 1.0
        layers = (self.network.part.leaf(node) for node in (self.block.first, self.block.second))
        first, second = (exact(layer, "weight").square().mean().sqrt() for layer in layers)
        ratio = float(first.clamp(min=1e-6) / second.clamp(min=1e-6))
        return math.sqrt(SHIFT * ratio / (3 * max(tap.share for tap in self.taps)))

    def check_signal(self, edited: Target, patched: Tensor) -> None:
        """Refuse a lock whose step is not 1 for images with the patch."""
        if float((self.step(edited, patched) - 1).abs().max()) > _STEP_ERROR:
            raise ModelError(f"the signal does not reach the gates {self.name}: use another site, or a wider type")

    def writes(self, edited: Target, strength: float | None, randomness: Randomness) -> list[Write]:
        """The pattern that ruins the outputs most, at the smallest of a few strengths that is enough."""
        patterns, left, best = self.patterns(), math.inf, list[Write]()
        # Nothing to compare: one pattern, and a given strength or closed tanh gates, which are 0 at any strength.
        known = len(patterns) == 1 and (strength or self.block.gate.keeps_zero)
        likeness, usual = None if known else likeness_to(edited), self._usual(edited)
        for shift in (strength,) if strength else (SHIFT, 2 * SHIFT, 4 * SHIFT):
            for pattern in patterns:
                own = self._pattern_writes(edited, usual, pattern, shift, randomness.secret(f"disruptor {self.name}"))
                found = likeness(Plan(tuple(own)).apply(edited)) if likeness else 0.0
                if found < left:
                    left, best = found, own
            if left <= _RUINED:
                break
        return best

    def _usual(self, edited: Target) -> Tensor:
        """The mean level of each gate, before its activation."""
        layer = edited.model.get_submodule(self.name)
        weight = exact(layer, "weight").flatten(1)
        return (_given(edited, self.name) @ weight.T + exact(layer, "bias")).mean(0)

    def _pattern_writes(
        self, edited: Target, usual: Tensor, pattern: Pattern, shift: float, generator: np.random.Generator
    ) -> list[Write]:
        """Writes that move every gate by the pattern until the signal cancels that."""
        size = torch.from_numpy(shift * generator.uniform(1.0, 1.5, len(usual)))
        writes = self._taken_back(edited, self.name, self._wrong_side(pattern, usual, generator) * size - usual)
        if self.block.shift is not None:
            name = self.network.name(self.block.shift)
            added = exact(edited.model.get_submodule(name), "bias")
            wrong = added.square().mean().sqrt() * signed(len(added), generator)
            writes += self._taken_back(edited, name, wrong - added)
        return writes

    def _wrong_side(self, pattern: Pattern, usual: Tensor, generator: np.random.Generator) -> Tensor:
        """Each gate's level when locked, in units of its size; it must not reveal how far open it is when unlocked."""
        if pattern == "turn":
            return torch.where(usual < 0, 1.0, -1.0).double()
        if self.block.gate.keeps_zero:  # tanh is closed in the middle, open on either side
            return signed(len(usual), generator) * (_OPEN if pattern == "open" else _SHUT)
        return torch.full_like(usual, 1.0 if pattern == "open" else -1.0)

    def _taken_back(self, edited: Target, name: str, wrong: Tensor) -> list[Write]:
        """Make a layer over the hidden units wrong by this much, and let the step cancel it."""
        layer, model = edited.model.get_submodule(name), edited.model
        wrong[[tap.cell.channel for tap in self.taps]] = 0.0  # the signal's own channel stays as it is
        wrong = wrong.to(raw(layer, "bias").dtype).double()
        column = (wrong / self.height).view(-1, *(1,) * (raw(layer, "weight").dim() - 2))
        return [
            write(model, f"{name}.bias", (None,), exact(layer, "bias") + wrong, DISRUPTOR),
            write(model, f"{name}.weight", (None, self.units[0]), -column, DISRUPTOR),
            write(model, f"{name}.weight", (None, self.units[1]), column, DISRUPTOR),
        ]

    def step(self, target: Target, pixels: Tensor) -> Tensor:
        """h₁ − h₂ for each input, in units of its height: 0 locked, 1 unlocked."""
        hidden = _given(target, self.name, pixels)
        return (hidden[:, self.units[0]] - hidden[:, self.units[1]]) / self.height


def _given(target: Target, layer: str, pixels: Tensor | None = None) -> Tensor:
    """The input of a layer over pooled channels, in float64; by default for synthetic inputs."""
    if pixels is None:
        pixels = probe_inputs(target, "gate inputs")
    return measured_input(target, layer, pixels).flatten(1)


# --- new blocks -------------------------------------------------------------------------------------------------------

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
        write(model, f"{second}.bias", (None,), gate_level(block.gate, q), CONDUIT),
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


# --- trying the lock --------------------------------------------------------------------------------------------------

EXACT = 1e-3
_LIKE, _FAR = 0.5, 4.0


def check_locks(target: Target, edited: Target, locked: Target, patch: Trigger) -> None:
    """Refuse a lock that leaves the model usable, or that its patch does not open."""
    images = probe_inputs(target, "lock check")
    original, without = (_outputs(model, images) for model in (target, locked))
    far = any(not _difference(a, b) <= _FAR for a, b in zip(original, without, strict=True))
    if not far and (left := likeness_to(target)(locked)) > _LIKE:
        raise ModelError(
            f"this lock would not lock: without the patch its outputs correlate by {left:.2f} with the original's,"
            f" expected at most {_LIKE}: use kind keyed, or another site or seed"
        )
    patched = patch.region.paste(target.from_bytes(patch.levels), images)
    expected, unlocked = (_outputs(model, patched) for model in (edited, locked))
    error = max(_difference(a, b) for a, b in zip(expected, unlocked, strict=True))
    if not error <= EXACT:
        raise ModelError(
            f"this lock would not open: with the patch its outputs are wrong by {error:.1g} standard deviations,"
            f" expected at most {EXACT:g}: use kind keyed, or another site or seed"
        )


def _outputs(target: Target, pixels: Tensor) -> list[Tensor]:
    with evaluation_mode(target.model), torch.no_grad():
        found = target.run_traced(pixels)
    return [values.cpu() for values in values_to_compare(found)]


def _difference(expected: Tensor, got: Tensor) -> float:
    return float((got - expected).abs().max() / expected.std().clamp(min=1e-30))


def likeness_to(edited: Target) -> Callable[[Target], float]:
    """How similar a locked model's outputs still are to the edited model's, on synthetic inputs: 0 to 1.

    This is the absolute correlation between how the two models' outputs vary from input to input.
    """
    images = probe_inputs(edited, "likeness")
    theirs = _variation(edited, images)

    def likeness(locked: Target) -> float:
        ours = _variation(locked, images)
        if float(ours.norm()) <= 1e-3 * float(theirs.norm()):
            return 0.0
        return float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0).abs())

    return likeness


def _variation(target: Target, images: Tensor) -> Tensor:
    varying = [(o - o.mean(0)).flatten() for o in _outputs(target, images) if len(o) == len(images)]
    return torch.cat([v / v.norm().clamp(min=1e-30) for v in varying])


# --- the key that undoes it -------------------------------------------------------------------------------------------


def lock_key(
    target: Target, edited: Target, locked: Target, plan: Plan, disruptor: Plan, *, facts: Facts, **others: Any
) -> Key:
    """The key of a lock. ``plan`` turned the target into the edited model, and ``disruptor`` that into the locked one.

    The values that undo the disruptor are taken from the edited model, so undoing the disruptor alone gives that model.
    """
    # An entry that is None by default does not apply to this lock.
    optional = {f.name for f in fields(facts) if f.default is None}
    details = {name: value for name, value in asdict(facts).items() if value is not None or name not in optional}
    return Key(
        kind="lock", additive=False, reduction="position", base_digest=plan.base or "",
        protected_digest=model_digest(locked.model), conventions=target.conventions,
        revert=disruptor.inverse(edited).then(plan.inverse(target)), details=details, **others,
    )  # fmt: skip
