"""One detector, written: levels chosen, Algorithm 1 or 2 put to work, and the record that goes into the key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.channel_cost import site_moments
from stainlock.key import Detector
from stainlock.network.features import at_tap, layer_input, respond
from stainlock.network.network import Network
from stainlock.network.norms import affine_of
from stainlock.network.sites import Site
from stainlock.plan import DETECTOR, Write
from stainlock.stains.convolution import add_to_kernel, replace_kernel, scale, usable_scale
from stainlock.stains.levels import Levels, Natural
from stainlock.stains.perceptron import add_to_neuron, replace_neuron
from stainlock.stains.transposed import add_to_tap, middle_tap, replace_tap
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import at, raw
from stainlock.trigger import Trigger

# How many deviations above its mean an additive stain lifts a channel whose statistics batch norm knows.
_OUT_OF_SPREAD = 12.0


@dataclass(frozen=True)
class Drawn:
    """A detector with its trigger, before it is written anywhere."""

    vector: Tensor
    channel: int
    trigger: Trigger
    natural: Natural


@dataclass(frozen=True)
class Reading:
    """What of a layer's responses counts: those at one position, their mean, or their maximum."""

    reduction: str
    position: tuple[int, ...]


def replace_channel(
    network: Network, site: Site, drawn: Drawn, firing_fraction: float, level: float | None
) -> tuple[list[Write], Detector]:
    """The non-additive stain of one channel; ``level`` is Δ, or None for a row of typical size."""
    target, k, response = network.target, drawn.channel, drawn.trigger.response
    assert site.activation is not None
    # A leak would pass a resting level far below zero on: there the detector rests at zero.
    fraction = 0.0 if site.activation.leak else firing_fraction
    if level is None:
        slope = abs(usable_scale(target.model, site.norm, k, DETECTOR)[0]) * typical_norm(target, site)
        levels = Levels.from_slope(slope, response, site.activation, fraction)
    else:
        levels = Levels.from_trigger(level, response, site.activation, fraction)
    if site.kind == "transposed":
        writes = replace_tap(target.model, site, k, drawn.vector, levels)
    elif site.kind == "linear" and site.norm is None:
        writes = replace_neuron(target.model, site, k, drawn.vector, levels)
    else:  # Algorithm 2 knows of batch norm, dense layers' too
        writes = replace_kernel(target.model, site, k, drawn.vector, levels, drawn.natural)
    return writes, record(target, site, drawn, levels.trigger, levels.rest)


def add_to_channel(
    network: Network, site: Site, drawn: Drawn, reading: Reading, level: float | None
) -> tuple[list[Write], Detector]:
    """The additive stain of one channel."""
    target, k, response = network.target, drawn.channel, drawn.trigger.response
    present = float(present_levels(target, site, drawn.trigger, drawn.vector, reading)[k])
    if level is None:
        level = _standing_out(network, site, k, present, response)
    if site.kind == "transposed":
        writes = add_to_tap(target.model, site, k, drawn.vector, response, present, level)
    elif site.kind == "linear" and site.norm is None:
        writes = add_to_neuron(target.model, site, k, drawn.vector, response, present, level)
    else:
        writes = add_to_kernel(target.model, site, k, drawn.vector, response, present, level)
    return writes, record(target, site, drawn, level, None)


def _standing_out(network: Network, site: Site, k: int, present: float, response: float) -> float:
    """Δ of an additive stain: a typical row's worth above what the channel gives, and well out of a known spread."""
    mean, deviation = (float(m[k]) for m in site_moments(network, site))
    rise = abs(scale(network.target.model, site, k)) * typical_norm(network.target, site) * response
    level = max(present, mean) + rise
    return max(level, mean + _OUT_OF_SPREAD * deviation) if site.norm else level


def typical_norm(target: Target, site: Site) -> float:
    """The median norm of the layer's rows: a detector of that size is neither a beacon nor the first to be pruned."""
    norms = site.rows(target.model).detach().double().norm(dim=1)
    return float(norms.median())


def record(target: Target, site: Site, drawn: Drawn, level: float | None, rest: float | None) -> Detector:
    """The detector as the key keeps it, with the row that stands there now."""
    replaced = present_row(target, site, drawn.channel)
    return Detector(drawn.vector, drawn.channel, drawn.trigger, level, rest, replaced)


def present_row(target: Target, site: Site, channel: int) -> Tensor:
    """The row that stands where a channel's detector goes."""
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
