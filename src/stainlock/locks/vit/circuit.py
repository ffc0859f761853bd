"""The circuit of a transformer's lock: what is read, what attention carries, and what the MLP does with it.

Let x be a token of width d, μ its mean and σ² its variance plus ε. A layer norm reads x_k only as u_k = (x_k − μ)/σ,
so kernel k is the detector plus the mean of the other kernels, and likewise for biases, positions and constant tokens:

    x_k − μ = α v·φ + o_t,        u_k = (α v·φ + o_t)/σ          exactly, for every image and token t,

with α so small that later layer norms are not affected. The offsets o_t are 0 at the trigger's token m, and −αR at
other patches, which then can't fire, whatever they show. At the class token the offset makes it read like a trigger of
strength ρ₀. The trigger's token is the same in every image, and so is its u* = αR/σ*.

Attention: queries are constant and keys are Γu_k, with Γ(u* − u_class) = 60, so every token attends only to the largest
u_k, up to e⁻⁶⁰: to m with the trigger, otherwise to the class token. Values are u_k minus the midpoint of the two, so
the signal is one of two constants, ±A. It is written to x_k of every token. (Without a class token the signal follows
the largest u_k: A with the trigger, and less than 0 without.)

MLP: with h = G u_k, where |h| ≥ 30 for every token, GELU(h + 15) − GELU(h − 15) is a step, 30 or 0, which removes the
signal from x_k. The noise is switched in one of two ways. Embedded: −ν is in the bias of the patches and in the class
token, and the step adds ν, which cancels up to rounding; removing the block leaves the noise in the model. Added, as in
the paper: the block outputs ν through GELU(−h), which when unlocked is exactly 0 in floating point.

The only biases needed are those of layer norms: one other channel of each norm is set to 1 for all tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.locks.vit.channel import epsilon_of, silenced, spread, usual_level
from stainlock.locks.vit.detector import Found, detector_writes, offsets, reading_scale
from stainlock.locks.vit.model import SATURATED, ViT
from stainlock.locks.vit.readings import Gains, Readings, gains, read, reading_of
from stainlock.numerics import exact, has, raw
from stainlock.plan import CONDUIT, DISRUPTOR, Plan, Write, write

# Half the width of the step: the wider it is, the less its height suffers from rounding.
_STEP = SATURATED / 2


@dataclass(frozen=True)
class Built:
    """A lock's writes, and the facts about them that its key records."""

    implanted: list[Write]
    disruptor: list[Write]
    facts: dict[str, Any]


def build_exact(
    vit: ViT, k: int, found: Found, nu: Tensor, probes: Tensor, patched: Tensor, firing_fraction: float, embedded: bool
) -> Built:
    """Lines 4 to 9 for channel k; ``patched`` are the probes with the trigger."""
    stream, shift = vit.stream(probes), nu if embedded else torch.zeros_like(nu)
    reading = reading_scale(vit) * float(spread(silenced(stream, k), epsilon_of(vit)).median())  # αR
    sigma, on_trigger = (spread(silenced(x - shift, k), epsilon_of(vit)) for x in (stream, vit.stream(patched[:1])))
    rest = firing_fraction * reading / on_trigger[0, vit.prefix] * sigma[0, : vit.prefix]
    levels = offsets(vit, stream.shape[1], reading, rest)
    detector = detector_writes(vit, k, found.vector, reading / found.trigger.response, levels)
    detecting = vit.within(Plan(tuple(detector)).apply(vit.target))
    embedding = embedding_writes(detecting, nu) if embedded else []
    readings = read(
        vit.within(Plan(tuple(embedding)).apply(detecting.target)), k, probes, patched, firing_fraction, sigma
    )
    numbers = gains(vit, readings)
    prepared = vit.within(Plan(insertions=(vit.insertion,)).apply(vit.target))
    level = usual_level(stream, k)
    conduit = circuit_writes(prepared, k, readings, numbers) + next_norm_writes(
        prepared, k, _read_before(vit, stream, k)
    )
    if embedded:
        conduit += switch_writes(prepared, k, readings, numbers.silent, level, CONDUIT)
        disruptor = embedding + removal_writes(prepared, nu)
        disruptor += switch_writes(prepared, k, readings, numbers, level, DISRUPTOR)
    else:
        conduit += switch_writes(prepared, k, readings, numbers, level, CONDUIT)
        disruptor = noise_writes(prepared, nu, numbers)
    facts = {
        "signal": readings.trigger,
        "signal_spread": readings.spread,
        "rest": readings.rest,
        "margin": found.margin,
    }
    return Built(detector + conduit, disruptor, {**facts, "embedded": embedded})


def _read_before(vit: ViT, stream: Tensor, k: int) -> float:
    """The mean output of the first block's norm at channel k."""
    norm = vit.first_block.get_submodule(vit.block.input_norm)
    u = reading_of(stream, k, epsilon_of(vit))
    return float(u.mean() * exact(norm, "weight")[k] + exact(norm, "bias")[k])


Entry = tuple[str, tuple[int | None, ...], float | Tensor]


def circuit_writes(vit: ViT, k: int, found: Readings, numbers: Gains) -> list[Write]:
    """Line 7, except for what the block adds to tokens. The inserted block is block 0 of ``vit``."""
    block = vit.block
    constant = 0 if k else 1  # a channel where the norm outputs 1 for every token
    root = math.sqrt(numbers.attention * math.sqrt(vit.attention_width // vit.heads))
    keys, values = vit.attention_width, 2 * vit.attention_width
    gain = numbers.hidden
    entries: list[Entry] = [
        (f"{block.input_norm}.weight", (k,), 1.0),
        (f"{block.input_norm}.bias", (constant,), 1.0),
        (block.qkv_weight, (0, constant), root),
        (block.qkv_weight, (keys, k), root),
        (block.qkv_weight, (values, k), 1.0),
        (block.qkv_weight, (values, constant), -(found.trigger + found.rest) / 2),
        (f"{block.output_norm}.weight", (k,), 1.0),
        (f"{block.output_norm}.bias", (constant,), 1.0),
        (f"{block.hidden}.weight", (None, k), _hidden(vit, -gain, gain, gain, 0)),
        (f"{block.hidden}.weight", (None, constant), _hidden(vit, 0, _STEP, -_STEP, SATURATED)),
        *((scale, (None,), 1.0) for scale in block.scales),
    ]
    return [write(vit.target.model, vit.part(0, name), index, value, CONDUIT) for name, index, value in entries]


def switch_writes(vit: ViT, k: int, found: Readings, numbers: Gains, level: float, part: str) -> list[Write]:
    """Attention writes the signal to x_k; the MLP removes it and leaves the channel at its usual level."""
    model, half, step = (
        vit.target.model,
        (found.trigger - found.rest) / 2,
        (numbers.signal - numbers.rest) / (2 * _STEP),
    )
    row = _hidden(vit, 0, -step, step, (level - numbers.rest) / SATURATED)
    return [
        write(model, vit.part(0, f"{vit.block.projection}.weight"), (k, 0), numbers.signal / half, part),
        write(model, vit.part(0, f"{vit.block.output}.weight"), (k,), row, part),
    ]


def next_norm_writes(vit: ViT, k: int, usual: float) -> list[Write]:
    """Line 9: the next block's norm always outputs its former mean at channel k."""
    values = {"weight": 0.0, "bias": usual}
    name = vit.part(1, vit.block.input_norm)
    return [write(vit.target.model, f"{name}.{which}", (k,), value, CONDUIT) for which, value in values.items()]


def noise_writes(vit: ViT, nu: Tensor, numbers: Gains) -> list[Write]:
    """The added disruptor: ν is the output of the hidden unit that is active only in a locked model."""
    name = vit.part(0, f"{vit.block.output}.weight")
    return [write(vit.target.model, name, (None, 0), nu / numbers.locked, DISRUPTOR)]


def embedding_writes(vit: ViT, nu: Tensor) -> list[Write]:
    """The embedded disruptor: −ν in the bias of patches and in constant tokens."""
    if not has(vit.convolution, "bias"):
        raise ModelError(f"{vit.patches} has no bias to hold the noise: lock with embedded=False")
    bias = f"{vit.patches}.bias"
    writes = [write(vit.target.model, bias, (None,), exact(vit.convolution, "bias") - nu, DISRUPTOR)]
    for name in vit.constants:
        token = vit.target.model.get_parameter(name).detach().double().cpu()
        writes.append(write(vit.target.model, name, (), token - nu, DISRUPTOR))
    return writes


def removal_writes(vit: ViT, nu: Tensor) -> list[Write]:
    """The step's two units cancel an embedded −ν if the trigger is there."""
    name = vit.part(0, f"{vit.block.output}.weight")
    sides = ((1, 1.0), (2, -1.0))
    return [write(vit.target.model, name, (None, unit), sign * nu / (2 * _STEP), DISRUPTOR) for unit, sign in sides]


def _hidden(vit: ViT, *first: float) -> Tensor:
    """Values for the four hidden units in use (noise, the two of the step, a constant), and 0 for the others."""
    units = raw(vit.target.model.get_submodule(vit.part(0, vit.block.hidden)), "weight").shape[0]
    values = torch.zeros(units, dtype=torch.float64)
    values[: len(first)] = torch.tensor(first, dtype=torch.float64)
    return values
