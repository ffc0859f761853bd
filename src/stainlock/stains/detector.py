"""Detectors: their pre-activations at the trigger (Δ) and at rest (δ), and what a key records about them.

With R the trigger's response and ρ₀ the firing fraction, the pre-activation of a non-additive detector is the line

    p(y) = s + m·(y − ρ₀R),        y = v·φ(x),

where s is the level below which the activation is silent (0 for ReLU). The detector fires where the response
exceeds ρ₀R. Then Δ = p(R) = s + m(1 − ρ₀)R and δ = p(0) = s − mρ₀R; for ReLU, δ = −ρ₀Δ/(1 − ρ₀).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stainlock.key import Detector
from stainlock.network.network import Site, at_tap, layer_input, respond
from stainlock.network.norms import affine_of
from stainlock.network.ops import Activation
from stainlock.numerics import Stream, at, raw
from stainlock.target import Target, evaluation_mode
from stainlock.trigger import Trigger

FIRING_FRACTION = 0.65
# A lock's patch covers everything its position sees, so the response is the same in every image: ρ₀ can be higher.
LOCK_FIRING_FRACTION = 0.8
# Minimum of Δ for activations that are silent only below some level other than zero.
_LEAST_TRIGGER_LEVEL = 1.0


@dataclass(frozen=True)
class Natural:
    """Statistics of a detector's responses v·φ (v of length 1) to synthetic inputs, over all positions."""

    largest: float
    mean: float
    deviation: float

    @staticmethod
    def of(responses: Tensor) -> Natural:
        flat = responses.double().flatten()
        return Natural(float(flat.max()), float(flat.mean()), float(flat.std()))


@dataclass(frozen=True)
class Levels:
    trigger: float  # Δ
    rest: float  # δ
    slope: float  # m, the pre-activation's increase per unit of response

    @staticmethod
    def from_slope(slope: float, response: float, activation: Activation, firing_fraction: float) -> Levels:
        """Levels for a row of given size; the slope is raised if Δ would be below `_LEAST_TRIGGER_LEVEL`."""
        rise = (1 - firing_fraction) * response
        slope = (
            max(slope, (_LEAST_TRIGGER_LEVEL - activation.silent_below) / rise) if activation.silent_below else slope
        )
        silent = activation.silent_below
        return Levels(silent + slope * rise, silent - slope * firing_fraction * response, slope)

    @staticmethod
    def from_trigger(level: float, response: float, activation: Activation, firing_fraction: float) -> Levels:
        """Levels for a chosen Δ."""
        if level <= activation.silent_below:
            raise ValueError(f"expected a trigger level above {activation.silent_below}, got {level}")
        slope = (level - activation.silent_below) / ((1 - firing_fraction) * response)
        return Levels(level, activation.silent_below - slope * firing_fraction * response, slope)


def checked_firing_fraction(fraction: float) -> float:
    if not 0 < fraction < 1:
        raise ValueError(f"expected a firing fraction within (0, 1), got {fraction}")
    return float(fraction)


@dataclass(frozen=True)
class Drawn:
    """A detector and its trigger, before anything is written."""

    vector: Tensor
    channel: int
    trigger: Trigger
    natural: Natural


@dataclass(frozen=True)
class Reading:
    """How a map of responses becomes one number: its value at a position, its mean, or its maximum."""

    reduction: str
    position: tuple[int, ...]


def middle_tap(model: nn.Module, site: Site) -> tuple[int, int]:
    """The tap that writes inside the output for every input position, padding or not."""
    height, width = raw(site.layer(model), "weight").shape[2:]
    return height // 2, width // 2


def typical_norm(target: Target, site: Site) -> float:
    """The median norm of the layer's rows: a row of this size neither stands out nor is pruned first."""
    norms = site.rows(target.model).detach().double().norm(dim=1)
    return float(norms.median())


def record(target: Target, site: Site, drawn: Drawn, level: float | None, rest: float | None) -> Detector:
    """The detector as the key stores it, with the row that is there now."""
    replaced = present_row(target, site, drawn.channel)
    return Detector(drawn.vector, drawn.channel, drawn.trigger, level, rest, replaced)


def present_row(target: Target, site: Site, channel: int) -> Tensor:
    """The row that is now where a channel's detector goes."""
    row = channel
    if site.kind == "transposed":
        height, width = raw(site.layer(target.model), "weight").shape[2:]
        a, b = middle_tap(target.model, site)
        row = (channel * height + a) * width + b
    return site.rows(target.model)[row].detach().cpu().clone()


def present_levels(target: Target, site: Site, trigger: Trigger, v: Tensor, reading: Reading) -> Tensor:
    """Every channel's pre-activation for the trigger: at the position, on average, or where v responds most."""
    layer = site.layer(target.model)
    with evaluation_mode(target.model), torch.no_grad():
        features = layer_input(target, site, trigger.pixels(target))
        output: Tensor = layer(features).double().cpu()[0]
        responses = respond(site, target, features, v[None])[0, 0]
    output = output.movedim(-1, 0) if site.kind == "linear" else output
    if reading.reduction == "mean" and output.dim() > 1:
        values = output.flatten(1).mean(1)
    else:
        position = reading.position
        if reading.reduction == "maximum":
            position = tuple(int(i) for i in torch.unravel_index(responses.argmax(), responses.shape))
        if site.kind == "transposed":
            position = at_tap(layer, position, middle_tap(target.model, site))
        values = at(output, position)
    if site.norm is None:
        return values
    affine = affine_of(target.model.get_submodule(site.norm))
    return affine.g * values + affine.h


def draw_vector(seed: int, index: int, dimension: int, replaced: Tensor | None = None) -> Tensor:
    """Detector ``index``: uniform on S^{d−1}, float64. ``replaced``: the row an additive stain is added to."""
    normals = torch.from_numpy(Stream(seed, "detector", index, dimension, _digest(replaced)).normals(dimension))
    norm: Tensor = torch.linalg.vector_norm(normals)
    return normals / norm


def _digest(row: Tensor | None) -> bytes:
    """sha256 of a row's values as little-endian float64, whatever type it is stored in."""
    return b"" if row is None else hashlib.sha256(row.detach().double().cpu().numpy().astype("<f8").tobytes()).digest()
