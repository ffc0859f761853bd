"""Edits of one model, grouped by what they have in common after the layer where they begin."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.evaluation.sharing.cut import Cut
from stainlock.network.network import Site
from stainlock.network.norms import PER_CHANNEL
from stainlock.numerics import tensor_digest
from stainlock.plan import Plan, Write, write
from stainlock.target import Target

Family = tuple[tuple[int, ...], str]
_MOST = 1 / 4  # fraction of a layer's channels; an edit that changes more is not split by channels


@dataclass(frozen=True)
class Edit:
    """The change that turns the original into one other model, and its inverse.

    ``channels`` are the site's channels that it changes. Edits of one family change the same channels and are identical
    everywhere else.
    """

    plan: Plan
    undo: Plan
    channels: tuple[int, ...]
    family: Family

    @classmethod
    def of(cls, working: Target, writes: tuple[Write, ...], cut: Cut) -> Edit:
        plan, own = Plan(writes), own_tensors(cut)
        state = working.model.state_dict()
        channels: set[int] = set()
        for w in writes:
            if w.parameter in own:
                channels.update(torch.unravel_index(w.elements, state[w.parameter].shape)[own[w.parameter]].tolist())
        if cut.site is not None and len(channels) > cut.site.channels * _MOST:
            own, channels = {}, set()
        elsewhere = [w for w in writes if w.parameter not in own]
        facts = {f"{w.parameter} {name}": getattr(w, name) for w in elsewhere for name in ("elements", "values")}
        ordered = tuple(sorted(channels))
        return cls(plan, plan.inverse(working), ordered, (ordered, tensor_digest(facts)))

    @property
    def is_same_elsewhere(self) -> bool:
        """Whether it equals the original outside the site."""
        return self.family[1] == tensor_digest({})


@contextmanager
def edited(working: Target, plan: Plan, undo: Plan) -> Iterator[None]:
    """Within the context, the working copy has the plan's values."""
    try:
        plan.write_into(working.model)
        yield
    finally:
        undo.write_into(working.model)


@dataclass(frozen=True)
class Carrier:
    """The site's layer with its channels replaced by those of many edits, so one call computes them all.

    Its shape is unchanged, so the same kernel adds in the same order. ``slots`` maps each of its channels to the number
    of an edit and that edit's channel.
    """

    plan: Plan
    undo: Plan
    slots: dict[int, tuple[int, int]]


def carriers(working: Target, cut: Cut, edits: list[Edit]) -> list[Carrier]:
    """Enough carriers for every changed channel to have a slot in the group whose inputs it reads."""
    site, own = cut.site, own_tensors(cut)
    if site is None:
        return []
    room = site.channels // site.groups
    taken: Counter[int] = Counter()
    slots: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    writes: dict[int, list[Write]] = defaultdict(list)
    for number, edit in enumerate(edits):
        with edited(working, edit.plan, edit.undo):
            state = {name: tensor for name, tensor in working.model.state_dict().items() if name in own}
            for channel in edit.channels:
                group = site.group_of(channel)
                carrier, place = divmod(taken[group], room)
                taken[group] += 1
                slot = group * room + place
                slots[carrier][slot] = (number, channel)
                for name, tensor in state.items():
                    index = [None] * own[name] + [slot]
                    row = tensor.select(own[name], channel).clone()
                    writes[carrier].append(write(working.model, name, index, row, "carrier"))
    plans = {carrier: Plan(tuple(found)) for carrier, found in writes.items()}
    return [Carrier(plan, plan.inverse(working), slots[carrier]) for carrier, plan in plans.items()]


def channel_maps(site: Site, maps: Tensor, channels: Iterable[int]) -> list[Tensor]:
    """Some channels of a site's activations."""
    return [maps.select(-1 if site.kind == "linear" else 1, channel) for channel in channels]


def own_tensors(cut: Cut) -> dict[str, int]:
    """The tensors that belong to the site's channels, each with its channel axis."""
    if cut.site is None:
        return {}
    axes = {f"{cut.site.name}.weight": 1 if cut.site.kind == "transposed" else 0, f"{cut.site.name}.bias": 0}
    if cut.norm is not None:
        axes |= {f"{cut.norm}.{name}": 0 for name in PER_CHANNEL}
    return axes
