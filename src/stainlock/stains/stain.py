"""stain(): choose a place, draw detectors, find their triggers, and put Algorithm 1 or 2 to work."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from stainlock.channel_cost import Choice, fold_loss, rank_channels
from stainlock.errors import SiteError, TriggerError
from stainlock.key import SHAKE_DERIVATION, Detector, Key, conventions_of
from stainlock.network.features import check_weight_is_used, layer_input, respond
from stainlock.network.network import Network, analyse
from stainlock.network.sites import Site
from stainlock.plan import Plan, Write
from stainlock.probes import probe_inputs
from stainlock.randomness import Randomness
from stainlock.stains import schemas
from stainlock.stains.detector import (
    Drawn,
    Reading,
    add_to_channel,
    present_levels,
    present_row,
    record,
    replace_channel,
)
from stainlock.stains.levels import FIRING_FRACTION, Natural, checked_firing_fraction
from stainlock.stains.message import places_needed
from stainlock.stains.secrets import draw_mask, draw_vector, message_vector
from stainlock.stains.site_choice import choose_output_site, choose_site
from stainlock.storage.files import begin_digests, combined_digest, edited_digest
from stainlock.target import Target, evaluation_mode
from stainlock.trigger import STEPS, Progress, Reduction, checked_position, default_position, find_triggers

Schema = Literal["none", "weight", "activation", "output"]
# A trigger this many times above plain inputs, and not far below its fellows, was worth its search; another gets a
# second search, of several starts.
_CLEAR, _SECOND_RESTARTS = 3.0, 4


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
    fold: bool = True,
    firing_fraction: float = FIRING_FRACTION,
    trigger_level: float | None = None,
    reduction: Reduction = "position",
    position: tuple[int, ...] | None = None,
    steps: int = STEPS,
    restarts: int = 1,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A stained copy of the target, and the key that proves it. The target itself is left as it is.

    - ``site``: a layer's name; chosen by dimension, patch size and least harm when not given.
    - ``additive``: add the detector to a neuron instead of replacing one.
    - ``schema``: ``weight`` writes ``message`` into the detector's signs, ``activation`` into the signs of the layer's
      activations for the trigger, ``output`` makes ``count`` triggers be classified as ``classes`` (random by default).
    - ``seed``: for experiments that must repeat; without it a secret one is drawn, which is what owners want.
    - ``channel_choice``, ``fold``: which channels are given up, and whether the mean that batch norm knows of them goes
      into the next biases.
    - ``trigger_level``: Δ; by default such that the detector's row is of a size typical for its layer.
    - ``reduction``, ``position``: what of the layer's responses the trigger maximises.
    """
    _check_arguments(schema, message, classes, count, additive)
    firing_fraction = checked_firing_fraction(firing_fraction)
    randomness = Randomness(seed)
    network = analyse(target)
    adds = additive or schema == "activation"
    chosen = _chosen_site(network, site, schema, adds, message)
    problem = chosen.additive_problem if adds else chosen.problem
    if problem:
        way_out = "" if problem == chosen.additive_problem else "; an additive stain can go here"
        raise SiteError(f"{chosen.name} can't carry this stain: {problem}{way_out}")
    check_weight_is_used(target, chosen)
    if not 1 <= count <= chosen.channels // 4:
        raise ValueError(f"expected a count from 1 to {chosen.channels // 4} at {chosen.name}, got {count}")

    digests = begin_digests(target.model)
    channels = rank_channels(network, chosen, channel_choice, folded=fold, live=adds)
    if reduction == "position":
        position = _default_position(chosen, schema) if position is None else checked_position(chosen, position)
    if schema == "output" and position:
        channels = schemas.heard_channels(network, chosen, channels, position)
    channels = channels[:count]
    if schema == "weight" and message is not None:
        vectors = message_vector(message, randomness.seed, chosen.dimension)[None]
    else:
        rows = [present_row(target, chosen, k) if adds else None for k in channels]
        vectors = torch.stack([draw_vector(randomness.seed, i, chosen.dimension, row) for i, row in enumerate(rows)])
    search = partial(_search, target, chosen, reduction=reduction, position=position, steps=steps, progress=progress)
    natural = _natural_responses(target, chosen, vectors, channels)
    drawn = search(vectors, channels, natural, restarts=restarts, noise=randomness, label="trigger")
    # A search that ended in a poor place is begun again elsewhere.
    usual = statistics.median(d.trigger.response for d in drawn)
    poor = [i for i, d in enumerate(drawn) if d.trigger.response < max(_CLEAR * d.natural.largest, usual / 2)]
    if poor:
        mine, theirs = [channels[i] for i in poor], [natural[i] for i in poor]
        second = search(
            vectors[poor], mine, theirs, restarts=_SECOND_RESTARTS, noise=randomness, label="second trigger"
        )
        for i, other in zip(poor, second, strict=True):
            drawn[i] = max(drawn[i], other, key=lambda d: d.trigger.response)
    natural_level = _checked_level(chosen, drawn, firing_fraction)

    reading = Reading(reduction, position or ())
    details: dict[str, Any] = {} if message is None else {"message_bytes": len(message.encode())}
    writes: list[Write] = []
    if schema == "activation" and message is not None:
        present = present_levels(target, chosen, drawn[0].trigger, drawn[0].vector, reading)
        writes = schemas.activation_writes(
            network, chosen, drawn[0].vector, drawn[0].trigger.response, present, message,
            draw_mask(randomness.seed, chosen.channels),
        )  # fmt: skip
        detectors = [record(target, chosen, drawn[0], None, None)]
    else:
        detectors = []
        for d in drawn:
            if additive:
                own, detector = add_to_channel(network, chosen, d, reading, trigger_level)
            else:
                own, detector = replace_channel(network, chosen, d, firing_fraction, trigger_level)
            writes += own
            detectors.append(detector)
        if fold and not additive:
            writes += fold_loss(network, chosen, {d.channel: _resting_output(chosen, d) for d in detectors})
    plan = Plan(tuple(writes), combined_digest(digests.result()))
    if schema == "output":
        column_writes, details = schemas.output_writes(
            network, chosen, detectors, plan, classes, randomness.seed, progress
        )
        plan += column_writes
    revert = plan.inverse(target)
    stained = plan.apply(target)
    stained_digest = edited_digest(stained.model, digests.result(), [w.parameter for w in plan.writes])
    key = Key(
        kind="stain", site=chosen.name, site_kind=chosen.kind, dimension=chosen.dimension,
        additive=adds, schema=schema, seed=randomness.seed,
        firing_fraction=firing_fraction, reduction=reduction, position=position or (),
        natural_level=natural_level, base_digest=plan.base or "", protected_digest=stained_digest,
        conventions=conventions_of(target), detectors=tuple(detectors), revert=revert, details=details,
        derivation=SHAKE_DERIVATION,
    )  # fmt: skip
    return stained, key


def _chosen_site(network: Network, name: str | None, schema: str, adds: bool, message: str | None) -> Site:
    if name is not None:
        return network.site(name)
    if schema == "output":
        return choose_output_site(network)
    channels = places_needed(message) if schema == "activation" and message else 1
    return choose_site(network, additive=adds, channels=channels)


def _default_position(site: Site, schema: str) -> tuple[int, ...]:
    """In the last blocks of a transformer only the class token, the first, still leads to the output."""
    return (0,) if schema == "output" and len(site.grid) == 1 else default_position(site)


def _resting_output(site: Site, detector: Detector) -> float:
    assert site.activation is not None
    assert detector.rest_level is not None
    return float(site.activation.function(torch.tensor(detector.rest_level, dtype=torch.float64)))


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


def _search(
    target: Target,
    site: Site,
    vectors: Tensor,
    channels: list[int],
    natural: list[Natural],
    *,
    reduction: Reduction,
    position: tuple[int, ...] | None,
    steps: int,
    restarts: int,
    noise: Randomness,
    label: str,
    progress: Progress | None,
) -> list[Drawn]:
    """Triggers of all detectors, group by group of the layer's inputs; in the order of the channels."""
    drawn: dict[int, Drawn] = {}
    for group in sorted({site.group_of(k) for k in channels}):
        mine = [i for i, k in enumerate(channels) if site.group_of(k) == group]
        found = find_triggers(
            target, site, vectors[mine], generator=noise.noise(f"{label} {group}"), group=group,
            reduction=reduction, position=position, steps=steps, restarts=restarts, progress=progress,
        )  # fmt: skip
        drawn |= {i: Drawn(vectors[i], channels[i], t, natural[i]) for i, t in zip(mine, found, strict=True)}
    return [drawn[i] for i in range(len(channels))]


def _natural_responses(target: Target, site: Site, vectors: Tensor, channels: list[int]) -> list[Natural]:
    """What each detector responds to inputs that need no data."""
    inputs = probe_inputs(target, "natural responses")
    with evaluation_mode(target.model), torch.no_grad():
        features = layer_input(target, site, inputs)
        return [
            Natural.of(respond(site, target, features, v[None], site.group_of(k)))
            for v, k in zip(vectors, channels, strict=True)
        ]


def _checked_level(site: Site, drawn: list[Drawn], firing_fraction: float) -> float:
    """The largest natural response of any detector; triggers must be far above it."""
    for d in drawn:
        natural = d.natural.largest
        if d.trigger.response * firing_fraction <= max(natural, 0.0):
            raise TriggerError(
                f"the trigger's response at {site.name} is {d.trigger.response:.3g}, not far enough above the"
                f" {natural:.3g} of plain inputs: use a site of higher dimension, more steps or restarts"
            )
    return max(d.natural.largest for d in drawn)
