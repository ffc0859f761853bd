"""Drafting a lock of a convolutional network: the site and the gates it takes, the edited model, and `finish`.

The edited model is a lock without its disruptors; `finish` adds these, tries the lock and makes the key.

The conduit comes before the detectors: in a residual stream, a channel given to the signal is also lost to layers
before the site, and the trigger must be found for the network that will see it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, fx, nn

from stainlock.errors import ModelError, SiteError, StainlockError, UnsupportedOp
from stainlock.facts import ConvolutionalFacts, InternalFacts
from stainlock.insertion import Insertion, moved
from stainlock.key import Key
from stainlock.locks.parts.conduit import Conduit, Disguise, build_conduit, conduit_writes
from stainlock.locks.parts.detectors import (
    Found,
    choose_levels,
    corner,
    corner_detectors,
    detector_writes,
    free_part,
    largest_patch,
    natural_levels,
    natural_maps,
    patch_size,
    patched_inputs,
    records,
)
from stainlock.locks.parts.disruptor import (
    GateDisruptor,
    GateForm,
    check_locks,
    half_open,
    lock_key,
    moved_means,
    neutral_writes,
    new_block,
)
from stainlock.locks.parts.route import Cell, behind_activation, find_route, routes_from, spread
from stainlock.network.network import Block, Network, Site, analyse
from stainlock.network.norms import lacks_statistics
from stainlock.network.object_detectors import Resizing, is_object_detector
from stainlock.numerics import Randomness, model_digest
from stainlock.plan import Plan, Write
from stainlock.stains.detector import Levels, checked_firing_fraction
from stainlock.target import Target, synthetic_inputs
from stainlock.trigger import find_triggers

# --- where the lock goes ----------------------------------------------------------------------------------------------

Item = TypeVar("Item")

# Smallest side of a patch, in pixels: a smaller one could be guessed.
_SMALLEST_PATCH = 5
# Choosing a site: number of sites tried, steps and synthetic inputs per trigger, detectors per site, and the ratio of
# the trigger's response to that of synthetic inputs that is good enough.
_CANDIDATES, _STEPS, _PROBES = 6, 20, 4
_DETECTORS = 4
_GOOD_MARGIN = 4.0
# The default gates: at the first places that every path passes through, LEAST_CUTS or more, until SECRETS channels have
# a secret gain; or, if there are too few such places, SEVERAL gates. With more gates guessing recovers less, but the
# signal's longer route costs more accuracy.
SECRETS, LEAST_CUTS = 256, 2
SEVERAL = 6


@dataclass(frozen=True)
class Demand:
    """What a lock needs of its place: a signal ``to_logits`` or to gates alone, the number of ``gates`` (None for the
    default), ``existing`` blocks, new ones (False) or either (None), and the ``count`` of detectors."""

    to_logits: bool
    gates: int | None = None
    existing: bool | None = None
    count: int = 1


@dataclass(frozen=True)
class Host:
    """A place for a gate: a ``block`` of the network's own, or a module, ``at``, before which a new block can be put: a
    layer, or a module that holds all the ``readers`` of a map.

    The signal passes it on the ``wire``-th part of its route.
    """

    wire: int
    block: Block | None = None
    at: str = ""
    readers: tuple[fx.Node, ...] = ()

    @property
    def map(self) -> fx.Node:
        """The map that is gated."""
        return self.block.squeezed if self.block else self.readers[0].all_input_nodes[0]


def hosts_on(network: Network, route: list[fx.Node], *, existing: bool, several: bool = False) -> list[Host]:
    """The places for gates along a route, in the order in which the signal passes them.

    With ``several`` detectors they come after the layer that subtracts the floor.
    """
    found: list[Host] = []
    for wire, (writer, exit) in enumerate(itertools.pairwise(route)):
        reached = spread(network, Cell(writer, 0), exit if exit in network.blocks else None)
        end = next(reading.cell for reading in reached.readings if reading.reader is exit)
        passed = [cell.node for cell in reached.path(end)]
        if several:
            start = behind_activation(network, passed) if wire else None
            passed, several = ([], True) if start is None else (passed[start:], False)
        if existing:
            blocks = [b for b in network.blocks.values() if b.squeezed in passed]
            found += [Host(wire, block) for block in blocks]
        else:
            readers = dict.fromkeys(r.reader for r in reached.readings if r.cell.node in passed)
            found += _new_hosts(network, wire, [r for r in readers if can_stand_before(network, r)])
    return found


def _new_hosts(network: Network, wire: int, readers: list[fx.Node]) -> list[Host]:
    """One place for all readers of a map if a module holds them, otherwise one before each reader."""
    found: list[Host] = []
    for map in dict.fromkeys(reader.all_input_nodes[0] for reader in readers):
        own = tuple(reader for reader in readers if reader.all_input_nodes[0] is map)
        shared = holder(network, map) if len(own) > 1 and set(own) == set(map.users) else None
        found += [Host(wire, at=shared, readers=own)] if shared else [
            Host(wire, at=network.name(reader), readers=(reader,)) for reader in own
        ]  # fmt: skip
    return found


def holder(network: Network, map: fx.Node) -> str | None:
    """The smallest module, called once, whose only input is this map and which holds everything that reads it."""
    around = [network.around(user) for user in map.users]
    shared = [step for step in around[0] if all(step in own for own in around)]
    for name in reversed(shared):
        inside = [n for n in network.part.graph.nodes if name in network.around(n)]
        given = {a for n in inside for a in n.all_input_nodes if a not in set(inside)}
        if given == {map} and network.calls_of(name) == 1:
            return network.path(name)
    return None


def can_stand_before(network: Network, reader: fx.Node) -> bool:
    """Whether gates can be put before a layer: a convolution over a map, called once, and not part of a block."""
    leaf = network.leaf(reader)
    if not isinstance(leaf, nn.Conv2d) or leaf.groups != 1 or network.calls[str(reader.target)] > 1:
        return False
    inner = {n for block in network.blocks.values() for n in (block.first, block.second)}
    return reader not in inner and network.area(reader.all_input_nodes[0]) > 1


class FindHosts(Protocol):
    """The places for gates along a route."""

    def __call__(self, route: list[fx.Node], *, existing: bool) -> list[Host]: ...


@dataclass(frozen=True)
class Placement:
    """The detectors' site, the signal's route from it, and the gates on the route; ``to_logits`` says whether the route
    goes on to the logits."""

    site: Site
    route: tuple[fx.Node, ...]
    hosts: tuple[Host, ...]
    to_logits: bool

    def insertions(self, network: Network, form: GateForm) -> tuple[Insertion, ...]:
        """New blocks in the order of insertion: those around larger modules first, since they rename what is inside."""
        new = sorted((host for host in self.hosts if host.readers), key=lambda host: host.at.count("."))
        ats: list[str] = []
        for host in new:
            ats.append(moved(host.at, ats))
        return tuple(new_block(network, at, host.readers, form) for at, host in zip(ats, new, strict=True))

    def carried_over(self, before: Network, after: Network) -> tuple[list[fx.Node], tuple[Block, ...]]:
        """The route and its blocks in the network that has the new ones."""
        gated = [insertion.at for insertion in after.target.insertions[len(before.target.insertions) :]]

        def node(old: fx.Node) -> fx.Node:
            found: fx.Node = after.nodes[moved(before.name(old), gated)]
            return found

        def block(host: Host) -> Block:
            if host.block is not None:
                second = moved(before.name(host.block.second), gated)
                return next(b for b in after.blocks.values() if after.name(b.second) == second)
            readers = {node(reader) for reader in host.readers}
            return next(b for b in after.blocks.values() if set(b.output.users) == readers)

        blocks = tuple(block(host) for host in self.hosts)
        if self.to_logits:
            return [node(n) for n in self.route], blocks
        last = self.hosts[-1].wire
        return [*(node(n) for n in self.route[: last + 1]), blocks[-1].product], blocks


def patch_problem(target: Target, site: Site, *, smooth: bool = False) -> str | None:
    """Why a site's patch can't unlock, or None. ``smooth``: a step makes the signal exact after smooth activations."""
    if site.kind != "convolution" or len(target.input_shape) != 3:
        return f"it is a {site.kind} layer: expected a convolution over an image"
    act = site.activation
    if act is not None and (act.leak or act.rest or (act.residue and not smooth)):
        return f"its activation {act.name} is never quite silent: the signal would not be exact"
    pixels = target.input_shape[1:]
    if site.field is None or any(a.start + a.size > n for a, n in zip(site.field, pixels, strict=True)):
        size = "everything" if site.field is None else "×".join(str(a.start + a.size) for a in site.field)
        return f"its patch ({size}) is larger than the input ({'×'.join(map(str, pixels))}): choose an earlier site"
    return None


def lock_sites(network: Network, demand: Demand) -> list[Site]:
    """Sites from which a route meets the demand."""
    found = []
    for site in network.sites.values():
        if site.problem is None and patch_problem(network.target, site, smooth=not demand.to_logits) is None:
            with suppress(StainlockError):
                place_gates(network, site, demand)
                found.append(site)
    return found


def choose_placement(network: Network, name: str | None, demand: Demand) -> Placement:
    """Where the lock goes, from the named site or from a chosen one; an error names sites that can be used."""
    if name is None:
        return place_gates(network, _choose_site(network, demand), demand)
    site = network.site(name)
    try:
        if problem := patch_problem(network.target, site, smooth=not demand.to_logits) or site.problem:
            raise SiteError(f"{site.name} can't hold a lock: {problem}")
        return place_gates(network, site, demand)
    except (SiteError, UnsupportedOp) as error:
        sites = sorted(lock_sites(network, demand), key=lambda s: math.prod(patch_size(network.target, s)))
        names = ", ".join(s.name for s in sites[:4])
        others = f"sites that would do: {names}" if sites else "no other site would do either"
        raise SiteError(f"{error}; {others}") from error


def _choose_site(network: Network, demand: Demand) -> Site:
    """The site with the smallest patch among those whose trigger stands out well from synthetic inputs.

    A patch for several detectors excites each of them less, so a larger margin is required.
    """
    target = network.target
    sites = lock_sites(network, demand)
    if not sites:
        raise SiteError(f"no site of this model can hold this lock: {_reason(network, demand)}")
    limit = largest_patch(target)
    small = [s for s in sites if s.groups == 1 and max(patch_size(target, s)) <= limit]
    if not small:
        least = min(math.prod(patch_size(target, s)) for s in sites)
        small = [s for s in sites if math.prod(patch_size(target, s)) == least]
    enough = [s for s in small if min(patch_size(target, s)) >= _SMALLEST_PATCH]
    tiny = [s for s in small if s not in enough]
    margins: dict[str, float] = {}
    for sites in (enough, tiny):
        widest = sorted(sites, key=lambda s: (-s.dimension, s.name))[:_CANDIDATES]
        margins |= {site.name: _margin(network, site) for site in widest}
        good = [s for s in widest if margins[s.name] >= _GOOD_MARGIN * math.sqrt(demand.count)]
        if good:
            return min(good, key=lambda s: (math.prod(patch_size(target, s)), -margins[s.name], s.name))
    return network.sites[max(margins, key=lambda name: (margins[name], name))]


def _margin(network: Network, site: Site) -> float:
    """The ratio of the trigger's response to that of synthetic inputs, for a few detectors and few steps."""
    target, generator = network.target, torch.Generator().manual_seed(0)
    v = corner_detectors(network, site, _DETECTORS, np.random.default_rng(0))
    triggers = find_triggers(target, site, v, generator=generator, position=corner(site), steps=_STEPS)
    natural = natural_levels(natural_maps(target, site, v, synthetic_inputs(target, _PROBES, generator), group=0))
    return statistics.median(t.response / float(n) for t, n in zip(triggers, natural, strict=True))


def _reason(network: Network, demand: Demand) -> str:
    """Why the most promising site can't be used."""
    for site in network.sites.values():
        if site.problem is None and patch_problem(network.target, site, smooth=not demand.to_logits) is None:
            try:
                place_gates(network, site, demand)
            except StainlockError as error:
                return str(error)
    return next((p for s in network.sites.values() if (p := patch_problem(network.target, s) or s.problem)), "none")


def place_gates(network: Network, site: Site, demand: Demand) -> Placement:
    """Gates for a signal from a site.

    By default one of the network's own blocks, or several new ones: enough at places that every path passes through, or
    up to SEVERAL. A network without logits gets one new block. A single gate is at the first place that the signal
    reaches. Several are where every path passes through them if possible, otherwise spread over the route.
    """
    count, find = demand.gates, partial(hosts_on, network, several=demand.count > 1)
    if demand.to_logits:
        route = find_route(network, site.name, network.logits)
        hosts = _hosts(find, route, demand.existing, count or 0)
        return Placement(site, tuple(route), _chosen(network, hosts, count or 0, site.name), True)
    kinds = [True, False] if demand.existing is None else [demand.existing]
    problem: SiteError | None = None
    for own in kinds:
        if count is None and not own and network.has_logits:
            with suppress(SiteError):
                route = find_route(network, site.name, network.logits)
                if enough := _first_cuts(network, find(route, existing=False)):
                    return Placement(site, tuple(route), enough, False)
        most = count or (1 if own or not network.has_logits else SEVERAL)
        for number in range(most, count - 1 if count else 0, -1):
            try:
                for route in _routes(network, site.name, find, own, number):
                    hosts = find(route, existing=own)
                    return Placement(site, tuple(route), _chosen(network, hosts, number, site.name), False)
            except SiteError as error:
                problem = problem or error
    what = {True: "no squeeze-and-excite block of its own", False: "no convolution to put gates before"}[kinds[-1]]
    raise problem or SiteError(f"the signal from {site.name} reaches {what}")


def _hosts(find: FindHosts, route: list[fx.Node], existing: bool | None, count: int) -> list[Host]:
    if existing is not None:
        return find(route, existing=existing)
    own = find(route, existing=True)
    return own if len(own) >= count > 0 else find(route, existing=False)


def _routes(network: Network, site: str, find: FindHosts, existing: bool, count: int) -> Iterator[list[fx.Node]]:
    """Routes with enough places for gates: for several gates the route to the logits, then the shortest first."""
    if count > 1 and network.has_logits:
        with suppress(SiteError):
            route = find_route(network, site, network.logits)
            if len(find(route, existing=existing)) >= count:
                yield route
    for route, reached in routes_from(network, site):
        goals: list[fx.Node] = []
        if existing:
            goals = [b.product for b in network.blocks.values() if any(c.node is b.product for c in reached.came_from)]
        else:
            goals = [r.reader for r in reached.readings if can_stand_before(network, r.reader)]
        for goal in goals:
            if len(find([*route, goal], existing=existing)) >= count:
                yield [*route, goal]


def _chosen(network: Network, hosts: list[Host], count: int, site: str) -> tuple[Host, ...]:
    """``count`` hosts in the signal's order: where every path passes through if possible, the rest evenly spread."""
    if count > len(hosts):
        raise SiteError(f"the signal from {site} passes {len(hosts)} places for gates: expected {count}")
    if count < 2:
        return tuple(hosts[:count])
    cuts = _cuts(network, hosts) if network.has_logits else []  # a network without logits has many outputs
    fitting = (_spread_out(cuts, number) for number in range(len(cuts), -1, -1))
    chosen = next(own for cut in fitting if len(own := list(itertools.chain(*cut))) <= count)
    rest = [host for host in hosts if host not in chosen]
    chosen += _spread_out(rest, count - len(chosen))
    return tuple(host for host in hosts if host in chosen)


def _first_cuts(network: Network, hosts: list[Host]) -> tuple[Host, ...]:
    """The first places that every path passes through, until enough channels have a secret gain; none if too few."""
    chosen: list[Host] = []
    for number, cut in enumerate(_cuts(network, hosts), 1):
        chosen += cut
        if number >= LEAST_CUTS and sum(network.shapes[host.map][1] for host in chosen) >= SECRETS:
            return tuple(chosen)
    return ()


def _cuts(network: Network, hosts: list[Host]) -> list[list[Host]]:
    """Sets of places that every path passes through, such as all readers of a map that cuts the network."""
    if any(host.block for host in hosts):
        return [[host] for host in hosts if host.block and network.cuts(host.block.output)]
    maps: dict[fx.Node, list[Host]] = {}
    for host in hosts:
        maps.setdefault(host.map, []).append(host)
    readers = {map: {reader for host in own for reader in host.readers} for map, own in maps.items()}
    return [own for map, own in maps.items() if set(map.users) == readers[map] and network.cuts(map)]


def _spread_out(items: list[Item], count: int) -> list[Item]:
    if count < 2:
        return items[:count]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# --- the model without its disruptors ---------------------------------------------------------------------------------

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
    internal: dict[str, Any] | None = None,
) -> tuple[Target, Key]:
    """Write the disruptors, which are in the gates and perhaps ``also`` in another layer, and make the key.

    ``internal`` are the facts of an internal lock.
    """
    target, conduit, found, options = edited.draft.target, edited.conduit, edited.found, edited.draft.options
    site, disruptor = conduit.site, Plan(tuple(disruptors))
    locked = disruptor.apply(edited.target)
    names = [*(name for gate in edited.gates for name in gate.readers), *([also] if also else [])]
    shared: dict[str, Any] = dict(
        layers=conduit.layers, restarts=options.restarts, disruptors=names,
        inserted=[insertion.at for insertion in edited.plan.insertions],
        saturated=conduit.saturated or not options.to_logits, anywhere=edited.position != corner(site),
        floor=found.floor,
        # The key alone must say how an object detector resizes images.
        resizing=Resizing.of(target.model).facts() if target.normalises and is_object_detector(target.model) else None,
        **free_part(conduit, found.vectors[0], edited.position),
    )  # fmt: skip
    facts = ConvolutionalFacts(**shared) if internal is None else InternalFacts(**shared, **internal)
    key = lock_key(
        target, edited.target, locked, edited.plan, disruptor, site=site.name, site_kind=site.kind,
        dimension=site.dimension, schema=schema, seed=randomness.seed, firing_fraction=found.opening_fraction,
        position=edited.position, natural_level=max(n.largest for n in found.natural),
        detectors=records(target, conduit, found, edited.levels), facts=facts,
    )  # fmt: skip
    check_locks(target, edited.target, locked, found.patch)
    return locked, key
