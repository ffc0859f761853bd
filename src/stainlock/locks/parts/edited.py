"""The edited model: a convolutional lock without its disruptors. `finish` adds these and makes the key.

The conduit comes before the detectors: in a residual stream, a channel given to the signal is also lost to layers
before the site, and the trigger must be found for the network that will see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from torch import Tensor

from stainlock.errors import ModelError
from stainlock.key import Key, lock_key
from stainlock.locks.check import check_locks
from stainlock.locks.parts.conduit import Conduit, Disguise, build_conduit, conduit_writes
from stainlock.locks.parts.detectors import (
    Found,
    choose_levels,
    corner,
    detector_writes,
    free_part,
    patched_inputs,
    records,
)
from stainlock.locks.parts.disruptor import GateDisruptor
from stainlock.locks.parts.gates import GateForm, half_open, moved_means, neutral_writes
from stainlock.locks.parts.placement import Demand, Placement
from stainlock.network.blocks import Block
from stainlock.network.network import Network, analyse
from stainlock.network.norms import lacks_statistics
from stainlock.network.object_detectors import Resizing, is_detector
from stainlock.plan import Plan, Write
from stainlock.randomness import Randomness
from stainlock.stains.detector import Levels, checked_firing_fraction
from stainlock.storage.files import model_digest
from stainlock.target import Target

Blocks = Literal["any", "existing", "inserted"]
Kernels = Literal["taps", "ones"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that Algorithms 3 and 4 share; `lock_squeeze_excite` documents each."""

    to_logits: bool
    count: int
    gates: int | None
    blocks: Blocks
    gate_form: GateForm
    conduit: Kernels
    obfuscate: bool
    firing_fraction: float | None
    strength: float | None
    restarts: int

    def __post_init__(self) -> None:
        counts = (
            ("count", self.count, 1), ("gates", self.gates, 0 if self.to_logits else 1), ("restarts", self.restarts, 1),
        )  # fmt: skip
        for name, number, least in counts:
            if number is not None and number < least:
                raise ValueError(f"expected {name} of at least {least}, got {number}")
        check_choice("blocks", self.blocks, Blocks)
        check_choice("gate_form", self.gate_form, GateForm)
        check_choice("conduit", self.conduit, Kernels)
        if self.strength is not None and not self.strength > 0:
            raise ValueError(f"expected a strength above 0, got {self.strength}")
        if self.firing_fraction is not None:
            checked_firing_fraction(self.firing_fraction)

    @property
    def demand(self) -> Demand:
        existing = {"existing": True, "inserted": False}.get(self.blocks)
        return Demand(self.to_logits, self.gates, existing, self.count)


def check_choice(name: str, choice: str, known: Any) -> None:
    """Refuse a value that is not one of a Literal's."""
    if choice not in get_args(known):
        raise ValueError(f"expected {name} {', '.join(get_args(known))}, got {choice!r}")


def traced_network(target: Target) -> Network:
    """The network of a target through which a signal can be followed: it can be traced as a whole, and outputs for an
    image don't depend on the rest of the batch."""
    for name, module in target.model.named_modules():
        if lacks_statistics(module):
            raise ModelError(
                f"batch norm {name} has no running statistics, so outputs depend on the whole batch and a signal is not"
                " reliable: train it with track_running_stats=True"
            )
    network = analyse(target)
    network.part  # noqa: B018 (raises if the model can't be traced)
    return network


@dataclass(frozen=True)
class Draft:
    """A lock without detectors and disruptors: the model with ``new`` blocks in it, and channels for the signal.

    ``neutral`` are the writes that make the new blocks do nothing, as in the model of the conduit's network.
    """

    target: Target
    conduit: Conduit
    new: tuple[Block, ...]
    neutral: tuple[Write, ...]
    options: Options

    @property
    def prepared(self) -> Target:
        return self.conduit.network.target

    @cached_property
    def carrying(self) -> Target:
        """The model with a conduit, in which the trigger is searched for."""
        return Plan(tuple(conduit_writes(self.conduit, [1.0] * self.options.count))).apply(self.prepared)


def draft_lock(network: Network, placement: Placement, options: Options, randomness: Randomness) -> Draft:
    """Put new blocks in, give the signal its channels, and make the blocks neutral."""
    target, form = network.target, options.gate_form
    insertions = placement.insertions(network, form)
    whole = network
    if insertions:
        prepared = Plan(insertions=insertions).apply(target)
        Plan(tuple(w for own in insertions for w in half_open(prepared.model, own))).write_into(prepared.model)
        whole = analyse(prepared)
    route, blocks = placement.carried_over(network, whole)
    disguise = Disguise(randomness if options.obfuscate else None, rounded=not options.to_logits)
    conduit = build_conduit(
        whole, placement.site, route, count=options.count, blocks=blocks, disguise=disguise,
        spreading=options.conduit == "ones",
    )  # fmt: skip
    new = tuple(block for host, block in zip(placement.hosts, blocks, strict=True) if host.block is None)
    neutral: list[Write] = []
    for block in new:
        secret = randomness.secret(f"gates {whole.name(block.second)}")
        neutral += neutral_writes(target, whole, block, form, disguise, secret, conduit.cells)
    if neutral:
        Plan(tuple(neutral)).write_into(whole.target.model)  # what is written next builds on these values
    return Draft(target, conduit, new, tuple(neutral), options)


@dataclass(frozen=True)
class Edited:
    """The edited model, what was written into it, and what its disruptors need: the ``gates`` that read the signal,
    the detectors' ``levels``, and images with the patch."""

    target: Target
    plan: Plan
    draft: Draft
    found: Found
    levels: tuple[Levels, ...]
    position: tuple[int, ...]
    gates: tuple[GateDisruptor, ...]

    @property
    def conduit(self) -> Conduit:
        return self.draft.conduit

    @property
    def signals(self) -> list[float]:
        """The detectors' pre-activations Δ when unlocked."""
        return [own.trigger for own in self.levels]

    @cached_property
    def patched(self) -> Tensor:
        return patched_inputs(self.draft.target, self.found.patch)

    def gate_writes(self, strength: float | None, randomness: Randomness) -> list[Write]:
        """The disruptors in the gates, of given strength or of the least that ruins the outputs."""
        writes: list[Write] = []
        for gate in self.gates:
            gate.check_signal(self.target, self.patched)
            writes += gate.writes(self.target, strength, randomness)
        return writes


def implant(draft: Draft, found: Found, position: tuple[int, ...], randomness: Randomness) -> Edited:
    """Write the detectors, the conduit, and the hidden units by which gates read the signal."""
    target, network = draft.target, draft.conduit.network
    draft = replace(draft, conduit=replace(draft.conduit, floor=found.floor))
    conduit, levels = draft.conduit, choose_levels(draft.prepared, draft.conduit, found)
    signals = [own.trigger for own in levels]
    gates = tuple(
        GateDisruptor(network, block, conduit.taps_of(block, signals), conduit.disguise, new=block in draft.new)
        for block in conduit.blocks
    )
    writes = [
        *draft.neutral, *conduit_writes(conduit, signals), *detector_writes(draft.prepared, conduit, found, levels),
        *(w for gate in gates for w in gate.step_writes()),
    ]  # fmt: skip
    insertions = draft.prepared.insertions[len(target.insertions) :]
    if draft.options.gate_form == "signed" and draft.new:
        edited = Plan(tuple(writes), insertions=insertions).apply(target)
        for block in draft.new:
            secret = randomness.secret(f"means {network.name(block.second)}")
            writes += moved_means(edited.model, network, block, secret, conduit.cells)
    plan = Plan(tuple(writes), model_digest(target.model), insertions)
    return Edited(plan.apply(target), plan, draft, found, tuple(levels), position, gates)


def finish(
    edited: Edited,
    disruptors: Sequence[Write],
    randomness: Randomness,
    *,
    schema: str,
    also: str | None = None,
    details: dict[str, Any] | None = None,
) -> tuple[Target, Key]:
    """Write the disruptors, which are in the gates and perhaps ``also`` in another layer, and make the key."""
    target, conduit, found, options = edited.draft.target, edited.conduit, edited.found, edited.draft.options
    site, disruptor = conduit.site, Plan(tuple(disruptors))
    locked = disruptor.apply(edited.target)
    names = [*(name for gate in edited.gates for name in gate.readers), *([also] if also else [])]
    facts: dict[str, Any] = {
        "layers": conduit.layers, "restarts": options.restarts, "disruptors": names,
        "saturated": conduit.saturated or not options.to_logits,
        "inserted": [insertion.at for insertion in edited.plan.insertions],
        "anywhere": edited.position != corner(site), "floor": found.floor,
        **free_part(conduit, found.vectors[0], edited.position), **(details or {}),
    }  # fmt: skip
    if target.normalises and is_detector(target.model):  # the key alone must say how images are resized
        facts["resizing"] = Resizing.of(target.model).facts()
    key = lock_key(
        target, edited.target, locked, edited.plan, disruptor, site=site.name, site_kind=site.kind,
        dimension=site.dimension, schema=schema, seed=randomness.seed, firing_fraction=found.opening_fraction,
        position=edited.position, natural_level=max(n.largest for n in found.natural),
        detectors=records(target, conduit, found, edited.levels), details=facts,
    )  # fmt: skip
    check_locks(target, locked, key)
    return locked, key
