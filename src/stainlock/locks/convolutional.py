"""Locks of convolutional networks: detectors, a conduit for their signal, and disruptors that it switches off.

Algorithms 3 and 4 differ in where the disruptors are: in the logits layer (`internal`), or in the gates of
squeeze-and-excite blocks (`squeeze_excite`). Everything else they share, and one signal can serve both.

The conduit comes before the detectors here: a channel given to the signal is also missed by layers before the detector
where a residual stream holds both, and the trigger must be found for the network that will see it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from stainlock.errors import ModelError, SiteError, UnsupportedOp
from stainlock.key import Detector, Key, lock_key
from stainlock.locks.internal import LogitsLock
from stainlock.locks.parts.conduit import Conduit, build_conduit
from stainlock.locks.parts.detectors import (
    Found,
    choose_levels,
    detector_writes,
    find_detectors,
    first_whole_position,
    free_part,
    patched_inputs,
)
from stainlock.locks.parts.disguise import Disguise
from stainlock.locks.parts.gates import GateForm, half_open, moved_means, neutral_writes
from stainlock.locks.parts.placement import Placement, place_gates
from stainlock.locks.parts.settings import Settings, check_settings
from stainlock.locks.parts.site_choice import (
    choose_lock_site,
    corner,
    largest_patch,
    patch_problem,
    patch_size,
    would_do,
)
from stainlock.locks.parts.wiring import conduit_writes
from stainlock.locks.squeeze_excite import SHIFT, GateLock, likeness
from stainlock.network.blocks import Block
from stainlock.network.network import Network, analyse
from stainlock.network.norms import lacks_statistics
from stainlock.network.object_detectors import Resizing, is_detector
from stainlock.network.sites import Site
from stainlock.plan import Plan, Write
from stainlock.randomness import Randomness
from stainlock.stains.detector import Levels, checked_firing_fraction
from stainlock.storage.files import model_digest
from stainlock.target import Target
from stainlock.trigger import Progress

# The signal at a gate is 1, but for what a half-precision type rounds.
_STEP_ERROR = 1e-2
# So much of what outputs say of inputs may be left by one block's gates.
_RUINED = 0.1


def lock_convolutional(
    target: Target,
    *,
    kind: str,
    site: str | None = None,
    seed: int | None = None,
    detectors: int = 1,
    gates: int | None = None,
    blocks: str = "any",
    gate_form: GateForm = "signed",
    place: str = "any",
    conduit: str = "taps",
    obfuscate: bool = True,
    firing_fraction: float | None = None,
    scale: float | None = None,
    steps: int = 60,
    tries: int = 8,
    progress: Progress | None = None,
) -> tuple[Target, Key]:
    """A locked copy of a convolutional network, and its key.

    - ``kind``: ``internal`` drowns the logits (Algorithm 3), ``squeeze-excite`` turns gates (Algorithm 4).
    - ``site``: the layer of the detectors; one with a small patch and a strong trigger is chosen when not given.
    - ``detectors``: so many, excited by one patch, must all be present: no patch for some of them opens the lock.
    - ``gates``: how many blocks' gates are turned, where nothing gets past them if there are such places, else spread
      over the network. By default as many new ones in a classifier as it takes to keep a few hundred gains secret, and
      one of a network's own blocks or in a detector; an ``internal`` lock has none by default, and drowns the logits
      besides.
    - ``blocks``: ``existing`` squeeze-and-excite blocks, newly ``inserted`` ones, or ``any``: the network's own if it
      has enough.
    - ``gate_form``: what a new block does when unlocked: secret ``signed`` gains and shifts of its channels, ``shifts``
      and gains above 0, ``gains`` alone, one ``constant`` gain, or the paper's nearly constant ``random`` ones.
    - ``place``: the patch opens at the ``corner`` alone or, for gates without logits, ``anywhere`` that a stride keeps;
      ``any`` prefers anywhere, if that takes no larger patch than 32 pixels or an eighth of the image's sides.
    - ``conduit``: one of the kernel's ``taps`` carries the signal, or all of them, the paper's ``ones``.
    - ``obfuscate``: hide the lock's weights among the layer's own kind.
    - ``scale``: the size of the disruption: s for logits, how far gates are turned; by default enough.
    - ``tries``: detectors drawn, of which those with the best trigger are taken; ``steps`` of their trigger's search.
    """
    settings = Settings(
        kind, detectors, gates, blocks, gate_form, place, obfuscate, conduit,
        None if firing_fraction is None else checked_firing_fraction(firing_fraction), scale, steps, tries,
    )  # fmt: skip
    check_settings(settings)
    check_batch_norms(target)
    randomness = Randomness(seed)
    draft = _draft(target, site, settings, randomness)
    carrying = Plan(tuple(conduit_writes(draft.conduit, [1.0] * detectors))).apply(draft.prepared)
    found = find_detectors(
        carrying, draft.conduit, draft.position, randomness, firing_fraction=firing_fraction, steps=steps, tries=tries,
        progress=progress,
    )  # fmt: skip
    draft = replace(draft, conduit=replace(draft.conduit, floor=found.floor))
    levels = choose_levels(draft.prepared, draft.conduit, found)
    return _locked(draft, found, levels, settings, randomness)


@dataclass(frozen=True)
class Draft:
    """A lock but for its detectors and disruptors: the target with new blocks in it, and channels for the signal.

    ``neutral`` is what makes the ``new`` blocks do nothing, as they do in the ``prepared`` target. ``position`` is
    where the detectors look for the patch.
    """

    target: Target
    prepared: Target
    conduit: Conduit
    new: list[Block]
    neutral: list[Write]
    position: tuple[int, ...]


def _draft(target: Target, site: str | None, settings: Settings, randomness: Randomness) -> Draft:
    network = analyse(target)
    network.part  # noqa: B018 (a lock needs a network that traces whole)
    chosen, placement = _placed(network, site, settings)
    insertions = placement.insertions(network, settings.gate_form)
    prepared = Plan(insertions=insertions).apply(target)
    Plan(tuple(w for own in insertions for w in half_open(prepared.model, own))).write_into(prepared.model)
    whole = analyse(prepared) if insertions else network
    route, blocks = placement.carried_over(network, whole)
    disguise = Disguise(randomness if settings.obfuscate else None, rounded=not settings.to_logits)
    conduit = build_conduit(
        whole, chosen, route, detectors=settings.detectors, blocks=blocks, disguise=disguise,
        spreading=settings.conduit == "ones",
    )  # fmt: skip
    new = [block for host, block in zip(placement.hosts, blocks, strict=True) if host.block is None]
    neutral: list[Write] = []
    for block in new:
        secret = randomness.secret(f"gates {whole.name(block.second)}")
        neutral += neutral_writes(target, whole, block, settings.gate_form, disguise, secret, conduit.cells)
    Plan(tuple(neutral)).write_into(prepared.model)  # what is written next builds on these values
    return Draft(target, prepared, conduit, new, neutral, _position(target, conduit, settings))


def _locked(
    draft: Draft, found: Found, levels: list[Levels], settings: Settings, randomness: Randomness
) -> tuple[Target, Key]:
    """Write everything, drown what must be drowned, and make the key."""
    target, conduit, site = draft.target, draft.conduit, draft.conduit.site
    signals = [own.trigger for own in levels]
    gates = [
        GateLock(conduit.network, block, conduit.taps_of(block, signals), conduit.disguise) for block in conduit.blocks
    ]
    implanted = [
        *draft.neutral, *conduit_writes(conduit, signals), *detector_writes(draft.prepared, conduit, found, levels),
        *(w for gate in gates for w in gate.step_writes()),
    ]  # fmt: skip
    insertions = draft.prepared.insertions[len(target.insertions) :]
    if settings.gate_form == "signed" and draft.new:
        edited = Plan(tuple(implanted), insertions=insertions).apply(target)
        for block in draft.new:
            secret = randomness.secret(f"means {conduit.network.name(block.second)}")
            implanted += moved_means(edited.model, conduit.network, block, secret, conduit.cells)
    plan = Plan(tuple(implanted), model_digest(target.model), insertions)
    edited = plan.apply(target)
    patched = patched_inputs(target, found.patch)
    disruptors = _turned_gates(edited, patched, gates, draft.new, settings, randomness)
    details: dict[str, Any] = {
        "layers": conduit.layers, "tries": settings.tries, "saturated": conduit.saturated or not settings.to_logits,
        "disruptors": [name for gate in gates for name in gate.listeners],
        "inserted": [insertion.at for insertion in insertions],
        "anywhere": draft.position != corner(site), "floor": found.floor,
        **free_part(conduit, found.vectors[0], draft.position),
    }  # fmt: skip
    if target.normalises and is_detector(target.model):  # who has no model but the key must know what it does to images
        details["resizing"] = Resizing.of(target.model).facts()
    if settings.to_logits:
        last = LogitsLock(conduit.network, conduit.taps(signals))
        received = last.received(edited, patched)
        gamma, scale = float(received.mean()), settings.scale or last.scale(target)
        disruptors += last.disruptor_writes(edited, scale, gamma, randomness.secret("disruptor"))
        details["disruptors"].append(last.name)
        details |= {"signal": gamma, "signal_spread": float((received - gamma).abs().max()), "scale": scale}
    disruptor = Plan(tuple(disruptors))
    locked = disruptor.apply(edited)
    rows = site.rows(target.model)
    records = tuple(
        Detector(v, channel, trigger, own.trigger, own.rest, rows[channel].detach().cpu().clone())
        for v, channel, trigger, own in zip(
            found.vectors, conduit.detector_channels, found.triggers, levels, strict=True
        )
    )
    key = lock_key(
        target, edited, locked, plan, disruptor, site=site.name, site_kind=site.kind, dimension=site.dimension,
        schema=settings.kind, seed=randomness.seed, firing_fraction=found.opening_fraction, position=draft.position,
        natural_level=max(n.largest for n in found.natural), detectors=records, details=details,
    )  # fmt: skip
    return locked, key


def _turned_gates(
    edited: Target,
    patched: Tensor,
    gates: list[GateLock],
    new: list[Block],
    settings: Settings,
    randomness: Randomness,
) -> list[Write]:
    """Disruptors in the gates, of the pattern that leaves least of the outputs, as far off as that takes."""
    writes: list[Write] = []
    for gate in gates:
        if float((gate.step(edited, patched) - 1).abs().max()) > _STEP_ERROR:
            raise ModelError(f"the signal does not arrive at the gates {gate.name}: use another site, or a wider type")
        patterns = gate.patterns(new=gate.block in new)
        left, best = math.inf, list[Write]()
        for scale in (settings.scale,) if settings.scale else (SHIFT, 2 * SHIFT, 4 * SHIFT):
            for pattern in patterns:
                own = gate.disruptor_writes(edited, pattern, scale, randomness.secret(f"disruptor {gate.name}"))
                # Of the middle there is but one: gates of either sign are closed as they are.
                known = len(patterns) == 1 and (settings.scale or gate.block.gate.name == "tanh")
                found = 0.0 if known else likeness(Plan(tuple(own)).apply(edited), edited)
                if found < left:
                    left, best = found, own
            if left <= _RUINED:
                break
        writes += best
    return writes


def _placed(network: Network, site: str | None, settings: Settings) -> tuple[Site, Placement]:
    """The site, chosen if need be, and where its signal goes; an error says which sites would do."""

    def place(name: str) -> Placement:
        return place_gates(
            network, name, settings.gates, existing=settings.existing, to_logits=settings.to_logits,
            several=settings.detectors > 1,
        )  # fmt: skip

    if site is None:
        chosen = choose_lock_site(network, place, smooth=not settings.to_logits, detectors=settings.detectors)
        return chosen, place(chosen.name)
    chosen = network.site(site)
    try:
        if problem := patch_problem(network.target, chosen, smooth=not settings.to_logits) or chosen.problem:
            raise SiteError(f"{chosen.name} can't hold a lock: {problem}")
        return chosen, place(chosen.name)
    except (SiteError, UnsupportedOp) as error:
        raise SiteError(f"{error}; {would_do(network, place, smooth=not settings.to_logits)}") from error


def _position(target: Target, conduit: Conduit, settings: Settings) -> tuple[int, ...]:
    """Where the detectors look for the patch: at the corner, or, for gates alone, where they see no padding.

    From there on the patch opens the gates wherever a stride keeps its position.
    """
    site, network = conduit.site, conduit.network
    if settings.to_logits or settings.place == "corner":
        return corner(site)
    stride = max(round(site.grid[0] / network.shapes[block.squeezed][2]) for block in conduit.blocks)
    position = first_whole_position(target, site, stride)
    if max(patch_size(target, site, position)) > largest_patch(target, anywhere=True) and settings.place == "any":
        return corner(site)
    return position


def check_batch_norms(target: Target) -> None:
    for name, module in target.model.named_modules():
        if lacks_statistics(module):
            raise ModelError(
                f"batch norm {name} has no running statistics, so that outputs depend on the whole batch and no signal"
                " is certain: train it with track_running_stats=True"
            )
