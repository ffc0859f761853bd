"""stain(): choose a place, draw detectors, find their triggers, and put Algorithm 1 or 2 to work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stainlock.errors import SiteError, TriggerError
from stainlock.files import model_digest
from stainlock.harm import Choice, affine_of, fold_loss, rank_channels, site_moments
from stainlock.keyfile import Detector, Key, conventions_of
from stainlock.plan import Plan, Write
from stainlock.randomness import Randomness
from stainlock.sites import Analysis, Site, analyse, layer_input
from stainlock.sphere import sample_sphere
from stainlock.stain import schemas
from stainlock.stain.choose import choose_output_site, choose_site
from stainlock.stain.convolution import add_to_kernel, replace_kernel, scale, usable_scale
from stainlock.stain.levels import FIRING_FRACTION, Levels, checked_firing_fraction
from stainlock.stain.message import places_needed
from stainlock.stain.perceptron import add_to_neuron, replace_neuron
from stainlock.stain.transposed import add_to_tap, middle_tap, replace_tap
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import at, raw
from stainlock.trigger import (
    Progress,
    Reduction,
    Trigger,
    checked_position,
    default_position,
    find_triggers,
    natural_responses,
    synthetic_inputs,
)  # fmt: skip

Schema = Literal["none", "weight", "activation", "output"]
_REPLACE = {"linear": replace_neuron, "convolution": replace_kernel, "transposed": replace_tap}
_ADD = {"linear": add_to_neuron, "convolution": add_to_kernel, "transposed": add_to_tap}
_PROBES = 4
_OUT_OF_SPREAD = 12.0


@dataclass(frozen=True)
class _Drawn:
    """A detector with its trigger, before it is written anywhere."""

    vector: Tensor
    channel: int
    trigger: Trigger


def stain(
    target: Target,
    site: str | None = None,
    *,
    additive: bool = False,
    schema: Schema = "none",
    message: str | None = None,
    classes: int | Sequence[int] | None = None,
    count: int = 1,
    seed: int | None = None,
    channel_choice: Choice = "outgoing",
    fold: bool = False,
    firing_fraction: float = FIRING_FRACTION,
    trigger_level: float | None = None,
    reduction: Reduction = "position",
    position: tuple[int, ...] | None = None,
    steps: int = 40,
    restarts: int = 1,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A stained copy of the target, and the key that proves it. The target itself is left as it is.

    - ``site``: a layer's name; chosen by dimension, patch size and least harm when not given.
    - ``additive``: add the detector to a neuron instead of replacing one.
    - ``schema``: ``weight`` writes ``message`` into the detector's signs, ``activation`` into the signs of the layer's
      activations for the trigger, ``output`` makes ``count`` triggers be classified as ``classes`` (random by default).
    - ``seed``: for experiments that must repeat; without it a secret one is drawn, which is what owners want.
    - ``channel_choice``, ``fold``: which channels are given up, and whether their mean goes into the next biases.
    - ``trigger_level``: Δ; by default such that the detector's row is of a size typical for its layer.
    - ``reduction``, ``position``: what of the layer's responses the trigger maximises.
    """
    _check_arguments(schema, message, classes, count, additive)
    firing_fraction = checked_firing_fraction(firing_fraction)
    randomness = Randomness(seed)
    analysis = analyse(target)
    adds = additive or schema == "activation"
    chosen = _chosen_site(analysis, site, schema, adds, message)
    problem = chosen.additive_problem if adds else chosen.problem
    if problem:
        way_out = "" if problem == chosen.additive_problem else "; an additive stain can go here"
        raise SiteError(f"{chosen.name} can't carry this stain: {problem}{way_out}")
    if not 1 <= count <= chosen.channels // 4:
        raise ValueError(f"expected a count from 1 to {chosen.channels // 4} at {chosen.name}, got {count}")

    channels = rank_channels(analysis, chosen, channel_choice, folded=fold, live=adds)[:count]
    vectors = _draw_vectors(chosen, count, schema, message, randomness)
    if reduction == "position":
        position = _default_position(chosen, schema) if position is None else checked_position(chosen, position)
    drawn = []
    for group in sorted({chosen.group_of(k) for k in channels}):
        mine = [i for i, k in enumerate(channels) if chosen.group_of(k) == group]
        found = find_triggers(
            target, chosen, vectors[mine], generator=randomness.noise(f"trigger {group}"), group=group,
            reduction=reduction, position=position, steps=steps, restarts=restarts, progress=progress,
        )  # fmt: skip
        drawn += [_Drawn(vectors[i], channels[i], trigger) for i, trigger in zip(mine, found, strict=True)]
    natural_level = _check_natural_level(target, chosen, drawn, firing_fraction)

    if schema == "activation":
        assert message is not None
        stream = randomness.secret("message")
        present = present_levels(target, chosen, drawn[0].trigger, reduction, position)
        plan_writes, details = schemas.activation_writes(
            analysis, chosen, drawn[0].vector, drawn[0].trigger.response, present, message, stream
        )
        detectors = [_record(target, chosen, drawn[0], None, None)]
    else:
        plan_writes, detectors, details = [], [], {}
        for d in drawn:
            writes, record = _write_detector(
                analysis, chosen, d, additive, firing_fraction, trigger_level, fold, reduction, position
            )
            plan_writes += writes
            detectors.append(record)
    if schema == "weight" and message is not None:
        details = {"message_bytes": len(message.encode())}
    plan = Plan(tuple(plan_writes), model_digest(target.model))
    if schema == "output":
        column_writes, details = schemas.output_writes(
            analysis, chosen, detectors, plan, classes, randomness.secret("classes"), progress
        )
        plan += column_writes
    revert = plan.inverse(target.model)
    stained = plan.apply(target)
    key = Key(
        kind="stain", site=chosen.name, site_kind=chosen.kind, dimension=chosen.dimension,
        additive=adds, schema=schema, seed=randomness.seed,
        firing_fraction=firing_fraction, reduction=reduction, position=position or (),
        natural_level=natural_level, base_digest=plan.base or "", protected_digest=model_digest(stained.model),
        conventions=conventions_of(target), detectors=tuple(detectors), revert=revert, details=details,
    )  # fmt: skip
    return stained, key


def _chosen_site(analysis: Analysis, name: str | None, schema: str, adds: bool, message: str | None) -> Site:
    if name is not None:
        return analysis.site(name)
    if schema == "output":
        return choose_output_site(analysis)
    channels = places_needed(message) if schema == "activation" and message else 1
    return choose_site(analysis, additive=adds, channels=channels)


def _default_position(site: Site, schema: str) -> tuple[int, ...]:
    """In the last blocks of a transformer only the class token, the first, still leads to the output."""
    return (0,) if schema == "output" and len(site.grid) == 1 else default_position(site)


def _check_arguments(
    schema: str, message: str | None, classes: int | Sequence[int] | None, count: int, additive: bool
) -> None:
    if schema not in ("none", "weight", "activation", "output"):
        raise ValueError(f"expected schema none, weight, activation or output, got {schema!r}")
    if (message is not None) != (schema in ("weight", "activation")):
        raise ValueError(f"expected a message with the schemas weight and activation only, got schema {schema!r}")
    if classes is not None and schema != "output":
        raise ValueError(f"expected classes with the schema output only, got schema {schema!r}")
    if schema in ("weight", "activation") and count != 1:
        raise ValueError(f"expected a count of 1 with the schema {schema}, got {count}")
    if additive and schema in ("weight", "output"):
        raise ValueError(f"expected a non-additive stain for the schema {schema}, which needs the detector alone")


def _draw_vectors(site: Site, count: int, schema: str, message: str | None, randomness: Randomness) -> Tensor:
    if schema == "weight":
        assert message is not None
        return schemas.message_detector(site, message, randomness)
    return sample_sphere(count, site.dimension, generator=randomness.secret("detector"))


def _check_natural_level(target: Target, site: Site, drawn: list[_Drawn], firing_fraction: float) -> float:
    """The largest response of any detector to inputs that need no data; triggers must be far above it."""
    inputs = synthetic_inputs(target, _PROBES, torch.Generator().manual_seed(1))
    level = -float("inf")
    for d in drawn:
        natural = float(natural_responses(target, site, d.vector[None], inputs, site.group_of(d.channel)).max())
        if d.trigger.response * firing_fraction <= max(natural, 0.0):
            raise TriggerError(
                f"the trigger's response at {site.name} is {d.trigger.response:.3g}, not far enough above the"
                f" {natural:.3g} of plain inputs: use a site of higher dimension, more steps or restarts"
            )
        level = max(level, natural)
    return level


def _write_detector(
    analysis: Analysis,
    site: Site,
    drawn: _Drawn,
    additive: bool,
    firing_fraction: float,
    level: float | None,
    fold: bool,
    reduction: str,
    position: tuple[int, ...] | None,
) -> tuple[list[Write], Detector]:
    target, k, v, response = analysis.target, drawn.channel, drawn.vector, drawn.trigger.response
    if additive:
        present = float(present_levels(target, site, drawn.trigger, reduction, position)[k])
        if level is None:
            level = _standing_out(analysis, site, k, present, response)
        writes = _ADD[site.kind](target.model, site, k, v, response, present, level)
        return writes, _record(target, site, drawn, level, None)
    assert site.activation is not None
    # A leak would pass a resting level far below zero on: there the detector rests at zero.
    fraction = 0.0 if site.activation.leak else firing_fraction
    if level is None:
        slope = abs(usable_scale(target.model, site, k)[0]) * typical_norm(target, site)
        levels = Levels.from_slope(slope, response, site.activation, fraction)
    else:
        levels = Levels.from_trigger(level, response, site.activation, fraction)
    writes = _REPLACE[site.kind](target.model, site, k, v, levels)
    if fold:
        writes += fold_loss(analysis, site, k, float(site.activation.function(torch.tensor(levels.rest).double())))
    return writes, _record(target, site, drawn, levels.trigger, levels.rest)


def _standing_out(analysis: Analysis, site: Site, k: int, present: float, response: float) -> float:
    """Δ of an additive stain: a typical row's worth above what the channel gives, and well out of a known spread."""
    mean, deviation = (float(m[k]) for m in site_moments(analysis, site))
    rise = abs(scale(analysis.target.model, site, k)) * typical_norm(analysis.target, site) * response
    level = max(present, mean) + rise
    return max(level, mean + _OUT_OF_SPREAD * deviation) if site.norm else level


def typical_norm(target: Target, site: Site) -> float:
    """The median norm of the layer's rows: of a size with the others, a detector stands out to no scanner."""
    norms = site.rows(target.model).detach().double().norm(dim=1)
    return float(norms.median())


def _record(target: Target, site: Site, drawn: _Drawn, level: float | None, rest: float | None) -> Detector:
    row = drawn.channel
    if site.kind == "transposed":
        height, width = raw(site.layer(target.model), "weight").shape[2:]
        a, b = middle_tap(target.model, site)
        row = (drawn.channel * height + a) * width + b
    replaced = site.rows(target.model)[row].detach().cpu().clone()
    return Detector(drawn.vector, drawn.channel, drawn.trigger, level, rest, replaced)


def present_levels(
    target: Target, site: Site, trigger: Trigger, reduction: str, position: tuple[int, ...] | None
) -> Tensor:
    """Every channel's pre-activation for the trigger, reduced as the trigger was, in float64."""
    layer = site.layer(target.model)
    with evaluation_mode(target.model), torch.no_grad():
        output: Tensor = layer(layer_input(target, site, trigger.pixels(target))).double().cpu()[0]
    output = output.movedim(-1, 0) if site.kind == "linear" else output
    if site.kind == "transposed" and position:
        taps = middle_tap(target.model, site)
        position = tuple(
            i * s + t * d - p
            for i, s, t, d, p in zip(position, layer.stride, taps, layer.dilation, layer.padding, strict=True)  # type: ignore[arg-type]
        )
    if reduction == "position":
        values = at(output, position or ())
    else:
        flat = output.flatten(1)
        values = flat.mean(1) if reduction == "mean" else flat.amax(1)
    if site.norm is None:
        return values
    affine = affine_of(target.model.get_submodule(site.norm))
    return affine.g * values + affine.h
