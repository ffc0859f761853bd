"""stain(): choose a site, draw detectors, find their triggers, and write them by Algorithm 1 or 2.

1   φ maps inputs to what layer j, the site, is given
2   W and b are the layer's weight and bias
3   draw the detector v uniformly from the sphere
4   optimise the trigger x* ∈ argmax r(v·φ(z))
5   replace row k by a multiple of v, or add one to it (`perceptron`, `convolution`, `transposed`)
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from stainlock.errors import SiteError, TriggerError
from stainlock.facts import Facts, MessageFacts
from stainlock.key import SHAKE_DERIVATION, Detector, Key
from stainlock.network.network import Network, Site, analyse, layer_input, respond
from stainlock.numerics import Randomness, at, begin_digests, combined_digest, edited_digest
from stainlock.plan import DETECTOR, Plan, Write
from stainlock.stains import schemas
from stainlock.stains.choice import (
    Choice,
    affordable_steps,
    choose_output_site,
    choose_site,
    fold_loss,
    rank_channels,
    site_moments,
)
from stainlock.stains.convolution import add_to_kernel, replace_kernel, scale, usable_scale
from stainlock.stains.detector import (
    FIRING_FRACTION,
    Drawn,
    Levels,
    Natural,
    Reading,
    checked_firing_fraction,
    draw_vector,
    present_levels,
    present_row,
    record,
    typical_norm,
)
from stainlock.stains.message import places_needed
from stainlock.stains.perceptron import add_to_neuron, replace_neuron
from stainlock.stains.proof import usual_count
from stainlock.stains.secrets import draw_mask, message_vector
from stainlock.stains.transposed import add_to_tap, replace_tap
from stainlock.target import Target, evaluation_mode, probe_inputs
from stainlock.trigger import STEPS, Progress, Reduction, checked_position, default_position, find_triggers

Schema = Literal["none", "weight", "activation", "output"]
# A trigger whose response is this many times the largest one to synthetic inputs, and at least half the median over all
# triggers, is good enough; others get a second search with this many restarts.
_CLEAR, _SECOND_RESTARTS = 3.0, 4
# A search ends early once every response is this many times the largest one to synthetic inputs, more than in any model
# of the benchmarks that was trained.
_PLENTY = 40.0
# A trigger whose φ has at least this cosine with v needs no second search.
_ALIGNED = 0.7
# How many other sites are tried if no trigger stands out at the one that was chosen.
_OTHER_SITES = 3
# A robust trigger's response may fall to two thirds in transmission; the response to look-alikes stays below half.
_ROBUST_FIRING_FRACTION = 0.55
# How many standard deviations above its mean an additive stain raises a channel, at least.
_OUT_OF_SPREAD = 12.0


def stain(
    target: Target,
    *,
    site: str | None = None,
    additive: bool = False,
    schema: Schema = "none",
    message: str | None = None,
    classes: int | Sequence[int] | None = None,
    count: int | None = None,
    seed: int | None = None,
    channel_choice: Choice = "outgoing",
    fold: bool = True,
    firing_fraction: float | None = None,
    trigger_level: float | None = None,
    reduction: Reduction = "position",
    position: tuple[int, ...] | None = None,
    steps: int | None = None,
    restarts: int = 1,
    robust: bool = False,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A stained copy of the target, and the key that proves it. The target itself does not change.

    - ``site``: a layer's name; by default chosen by dimension, patch size, search cost and channel cost. If no trigger
      stands out there, others are tried.
    - ``additive``: add the detector to a neuron instead of replacing one; automatic if no site allows replacing.
    - ``schema``: ``weight`` writes ``message`` into the detector's signs, ``activation`` into the signs of the layer's
      activations for the trigger, ``output`` makes the model classify ``count`` triggers as ``classes`` (random by
      default).
    - ``count``: number of detectors; by default 1, with the schema output as many as a proof by outputs needs.
    - ``seed``: for reproducible experiments; owners should leave it out, so that a secret one is drawn.
    - ``channel_choice``, ``fold``: how channels to give up are chosen, and whether their means, if batch norm has them,
      are folded into the next biases.
    - ``trigger_level``: Δ; by default such that the detector's row has a norm typical of its layer.
    - ``reduction``, ``position``: which of the layer's responses the trigger maximises.
    - ``steps``: steps of the trigger search; by default fewer if they are expensive and the trigger stands out anyway.
    - ``robust``: triggers that survive JPEG, resizing and a shift of a few pixels; the search takes longer.

    >>> import stainlock as sl, torch
    >>> from torch import nn
    >>> layers = [nn.Conv2d(3, 32, 5), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
    >>> head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    >>> target = sl.Target(nn.Sequential(*layers, *head), (3, 32, 32))
    >>> stained, key = sl.stain(target)
    >>> sl.verify(stained, key).stained
    True
    """
    _check_arguments(schema, message, classes, 1 if count is None else count, additive)
    if firing_fraction is None:
        firing_fraction = _ROBUST_FIRING_FRACTION if robust else FIRING_FRACTION
    firing_fraction = checked_firing_fraction(firing_fraction)
    randomness, network = Randomness(seed), analyse(target)

    if site is None and schema == "none" and not additive:
        # If no activation silences a channel, as behind group norm, only an additive stain is possible.
        additive = all(s.problem for s in network.sites.values())
    adds = additive or schema == "activation"
    chosen = _chosen_site(network, site, schema, adds, message)  # 1, 2
    count = _checked_count(target, chosen, schema, count, robust)
    digests = begin_digests(target.model)
    placed = position is not None
    if reduction == "position":
        position = _default_position(chosen, schema) if position is None else checked_position(chosen, position)
    channels = rank_channels(network, chosen, channel_choice, folded=fold, live=adds)
    if schema == "output" and position:
        channels = schemas.heard_channels(network, chosen, channels, position)
    channels = channels[:count]

    spelt = message if schema == "weight" else None
    vectors = _draw_vectors(target, chosen, channels, randomness.seed, spelt, adds)  # 3
    try:
        drawn = _best_triggers(  # 4
            network, chosen, vectors, channels, schema=schema, reduction=reduction, position=position, steps=steps,
            restarts=restarts, robust=robust, randomness=randomness, progress=progress,
        )  # fmt: skip
        natural_level = _checked_level(chosen, drawn, firing_fraction)
    except TriggerError:
        for other in _other_sites(network, chosen, adds) if schema == "none" and site is None and not placed else ():
            with suppress(TriggerError):
                return stain(
                    target, site=other, additive=additive, count=count, seed=randomness.seed,
                    channel_choice=channel_choice, fold=fold, firing_fraction=firing_fraction,
                    trigger_level=trigger_level, reduction=reduction, steps=steps, restarts=restarts, robust=robust,
                    progress=progress,
                )  # fmt: skip
        raise

    reading = Reading(reduction, position or ())
    facts: Facts = Facts() if message is None else MessageFacts(message_bytes=len(message.encode()))
    if schema == "activation" and message is not None:
        writes, detectors = _spell(network, chosen, drawn[0], reading, message, randomness.seed)
    elif additive:
        writes, detectors = _each(add_to_channel(network, chosen, d, reading, trigger_level) for d in drawn)  # 5
    else:
        writes, detectors = _each(
            replace_channel(network, chosen, d, firing_fraction, trigger_level) for d in drawn
        )  # 5
        if fold:
            writes += fold_loss(network, chosen, {d.channel: _resting_output(chosen, d) for d in detectors})
    plan = Plan(tuple(writes), combined_digest(digests.result()))
    if schema == "output":
        column_writes, facts = schemas.output_writes(
            network, chosen, detectors, plan, classes, randomness.seed, progress, robust=robust
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
        conventions=target.conventions, detectors=tuple(detectors), revert=revert, details=dataclasses.asdict(facts),
        derivation=SHAKE_DERIVATION,
    )  # fmt: skip
    return stained, key


def replace_channel(
    network: Network, site: Site, drawn: Drawn, firing_fraction: float, level: float | None
) -> tuple[list[Write], Detector]:
    """Replace one channel by the detector; ``level`` is Δ, or None for a row of typical size."""
    target, k, response = network.target, drawn.channel, drawn.trigger.response
    assert site.activation is not None
    # A leaky activation would pass on a negative resting level, so the detector rests at zero.
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
    else:  # Algorithm 2 handles batch norm, behind dense layers too
        writes = replace_kernel(target.model, site, k, drawn.vector, levels, drawn.natural)
    return writes, record(target, site, drawn, levels.trigger, levels.rest)


def add_to_channel(
    network: Network, site: Site, drawn: Drawn, reading: Reading, level: float | None
) -> tuple[list[Write], Detector]:
    """Add the detector to one channel."""
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
    """Δ of an additive stain: above the channel's own level by the response of a row of typical size, and far outside
    the channel's range."""
    mean, deviation = (float(m[k]) for m in site_moments(network, site))
    rise = abs(scale(network.target.model, site, k)) * typical_norm(network.target, site) * response
    return max(max(present, mean) + rise, mean + _OUT_OF_SPREAD * deviation)


def _chosen_site(network: Network, name: str | None, schema: str, adds: bool, message: str | None) -> Site:
    """The site with that name, or a good one; an error if it can't carry the stain."""
    places = places_needed(message) if message else 1
    if name is not None:
        site = network.site(name)
    elif schema == "output":
        site = choose_output_site(network)
    elif schema == "activation":
        site = choose_site(network, additive=adds, channels=places)
    else:
        site = choose_site(network, additive=adds, dimension=places)
    problem = site.additive_problem if adds else site.problem
    if problem:
        way_out = "" if problem == site.additive_problem else "; an additive stain can go here"
        raise SiteError(f"{site.name} can't carry this stain: {problem}{way_out}")
    return site


def _other_sites(network: Network, first: Site, adds: bool) -> Iterator[str]:
    """The next sites to try if no trigger stands out at the first one."""
    tried = {first.name}
    for _ in range(_OTHER_SITES):
        with suppress(SiteError):
            site = choose_site(network, additive=adds, without=tried)
            tried.add(site.name)
            yield site.name


def _checked_count(target: Target, site: Site, schema: str, count: int | None, robust: bool) -> int:
    if count is None:
        count = min(usual_count(target, robust=robust), max(1, site.channels // 4)) if schema == "output" else 1
    if not 1 <= count <= site.channels // 4:
        raise ValueError(f"expected a count from 1 to {site.channels // 4} at {site.name}, got {count}")
    return count


def _draw_vectors(
    target: Target, site: Site, channels: list[int], seed: int, message: str | None, adds: bool
) -> Tensor:
    """A detector for each channel: uniform on the sphere, or with a message in the signs of one."""
    if message is not None:
        return message_vector(message, seed, site.dimension)[None]
    rows = [present_row(target, site, k) if adds else None for k in channels]
    return torch.stack([draw_vector(seed, i, site.dimension, row) for i, row in enumerate(rows)])


def _best_triggers(
    network: Network,
    site: Site,
    vectors: Tensor,
    channels: list[int],
    *,
    schema: str,
    reduction: Reduction,
    position: tuple[int, ...] | None,
    steps: int | None,
    restarts: int,
    robust: bool,
    randomness: Randomness,
    progress: Progress | None,
) -> list[Drawn]:
    """The best trigger of each detector. Searches that ended in poor local maxima are repeated with all steps."""
    target = network.target
    natural = _natural_responses(target, site, vectors, channels)
    full = first = STEPS if steps is None else steps
    short = schema == "none" and steps is None and reduction == "position" and not robust
    if short:
        first = affordable_steps(network, site)
    enough = _PLENTY * max(max(n.largest, n.deviation) for n in natural) if short and restarts == 1 else math.inf
    search = partial(
        _search, target, site, reduction=reduction, position=position, noise=randomness, progress=progress,
        window=short, robust=robust, repels=schema == "output",
    )  # fmt: skip
    drawn = search(vectors, channels, natural, steps=first, enough=enough, restarts=restarts, label="trigger")
    usual = statistics.median(d.trigger.response for d in drawn)
    poor = [
        i for i, d in enumerate(drawn)
        if d.trigger.response < max(_CLEAR * d.natural.largest, usual / 2)
        and not (reduction == "position" and position and _is_aligned(target, site, d, position))
    ]  # fmt: skip
    if poor:
        mine, theirs = [channels[i] for i in poor], [natural[i] for i in poor]
        again = 1 if robust else _SECOND_RESTARTS
        second = search(vectors[poor], mine, theirs, steps=full, restarts=again, label="second trigger")
        for i, other in zip(poor, second, strict=True):
            drawn[i] = max(drawn[i], other, key=lambda d: d.trigger.response)
    return drawn


def _spell(
    network: Network, site: Site, drawn: Drawn, reading: Reading, message: str, seed: int
) -> tuple[list[Write], list[Detector]]:
    """Write a message into the signs of the layer's activations for the trigger."""
    target = network.target
    present = present_levels(target, site, drawn.trigger, drawn.vector, reading)
    mask = draw_mask(seed, site.channels)
    writes = schemas.activation_writes(network, site, drawn.vector, drawn.trigger.response, present, message, mask)
    return writes, [record(target, site, drawn, None, None)]


def _each(edits: Iterable[tuple[list[Write], Detector]]) -> tuple[list[Write], list[Detector]]:
    """The writes of all detectors together, and the detectors."""
    own, detectors = zip(*edits, strict=True)
    return [w for writes in own for w in writes], list(detectors)


def _default_position(site: Site, schema: str) -> tuple[int, ...]:
    """For the output schema, a transformer's class token, which comes first: from the last blocks only that reaches
    the output."""
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
    robust: bool,
    repels: bool,
    window: bool,
    enough: float = math.inf,
) -> list[Drawn]:
    """Triggers of all detectors, in the order of the channels; those of one group are searched together."""
    drawn: dict[int, Drawn] = {}
    for group in sorted({site.group_of(k) for k in channels}):
        mine = [i for i, k in enumerate(channels) if site.group_of(k) == group]
        found = find_triggers(
            target, site, vectors[mine], generator=noise.noise(f"{label} {group}"), group=group,
            reduction=reduction, position=position, steps=steps, restarts=restarts, progress=progress,
            robust=robust, repels=repels,
            window=window, enough=enough,
        )  # fmt: skip
        drawn |= {i: Drawn(vectors[i], channels[i], t, natural[i]) for i, t in zip(mine, found, strict=True)}
    return [drawn[i] for i in range(len(channels))]


def _is_aligned(target: Target, site: Site, drawn: Drawn, position: tuple[int, ...]) -> bool:
    """Whether φ at the trigger already points along v, so that another search would gain little: v·φ ≤ ‖φ‖, and behind
    a layer norm ‖φ‖ is the same for every image."""
    with evaluation_mode(target.model), torch.no_grad():
        features = layer_input(target, site, drawn.trigger.pixels(target))
        squares = respond(
            site, target, features.square(), torch.ones_like(drawn.vector)[None], site.group_of(drawn.channel)
        )
    length = math.sqrt(max(0.0, float(at(squares[0, 0], position))))
    return drawn.trigger.response >= _ALIGNED * length


def _natural_responses(target: Target, site: Site, vectors: Tensor, channels: list[int]) -> list[Natural]:
    """Each detector's responses to synthetic inputs."""
    inputs = probe_inputs(target, "natural responses")
    with evaluation_mode(target.model), torch.no_grad():
        features = layer_input(target, site, inputs)
        return [
            Natural.of(respond(site, target, features, v[None], site.group_of(k)))
            for v, k in zip(vectors, channels, strict=True)
        ]


def _checked_level(site: Site, drawn: list[Drawn], firing_fraction: float) -> float:
    """The largest natural response of any detector; an error if a trigger's response is not far above its own."""
    for d in drawn:
        natural = d.natural.largest
        if d.trigger.response * firing_fraction <= max(natural, 0.0):
            raise TriggerError(
                f"the trigger's response at {site.name} is {d.trigger.response:.3g}, not far enough above the"
                f" {natural:.3g} of plain inputs: use a site of higher dimension, more steps or restarts"
            )
    return max(d.natural.largest for d in drawn)
