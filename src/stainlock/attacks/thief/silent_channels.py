"""Excites channels that never fire on the thief's inputs, by activation maximisation, and tries the resulting patches.

The row of a silent channel is what the owner optimised the patch for, so a thief who suspects the right channel finds
the same patch. Channels furthest from firing, relative to their layer, are tried first, both at the corner and at a
position that sees no padding. The patch that makes the model's answers most informative (`guessed_patch`) is kept. A
lock with two detectors needs both, so pairs of channels of one layer are tried too, with a patch that excites both
equally. A lock that drowns the logits needs the signal at one exact level; recentring the logits for each patch avoids
this.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stainlock.attacks.attack import Attack, Attacked, Change, NotApplicable, Strength, Subject, number
from stainlock.attacks.pixels import Pictures
from stainlock.attacks.thief.guessed_patch import judged, pasting
from stainlock.attacks.thief.logit_bias import recentred
from stainlock.locks.keyed import Structure
from stainlock.network.network import Network, Site, analyse, layer_input, respond
from stainlock.network.norms import affine_of
from stainlock.numerics import exact, has
from stainlock.target import Target, evaluation_mode, synthetic_inputs
from stainlock.trigger import Trigger, find_triggers, seen_region

PROBES, JUDGES = 16, 8
PAIR_STEPS = 120
LARGEST = 40  # largest patch side to look for, in pixels; at most half of the image's, too


@dataclass(frozen=True)
class Suspect:
    """A channel that never fired; ``score`` is its distance from firing, in deviations of the layer's responses."""

    site: Site
    channel: int
    score: float


PatchesOf = Callable[[Target, list[Suspect], torch.Generator], list[Change]]


def suspects(network: Network, pixels: Tensor) -> list[Suspect]:
    """Silent channels of layers whose receptive field fits into a patch, the most suspicious first."""
    target, found = network.target, list[Suspect]()
    largest = min(LARGEST, min(target.input_shape[1:]) // 2)
    for site in network.sites.values():
        if site.kind != "convolution" or site.groups != 1 or site.problem or len(site.grid) != 2:
            continue
        if max(site.patch) > largest or site.field is None:
            continue
        thresholds = _thresholds(target, site)
        rows = site.rows(target.model).double()
        with evaluation_mode(target.model), torch.no_grad():
            unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
            maps = respond(site, target, layer_input(target, site, pixels), unit).double().cpu()
        reached = maps.transpose(0, 1).flatten(1).amax(1)
        silent = (reached < thresholds).nonzero().flatten().tolist()
        usual = maps.flatten(2).std().clamp(min=1e-30)
        scores = ((thresholds - reached) / usual).tolist()
        found += [Suspect(site, c, scores[c]) for c in silent if scores[c] < float("inf")]
    return sorted(found, key=lambda s: -s.score)


def _thresholds(target: Target, site: Site) -> Tensor:
    """The response of the unit row at which each channel begins to fire; infinite if it never can."""
    layer: Any = site.layer(target.model)
    sizes = site.rows(target.model).double().norm(dim=1).cpu()
    bias = exact(layer, "bias") if has(layer, "bias") else torch.zeros_like(sizes)
    if site.norm is None:
        return torch.where(sizes > 0, -bias / sizes.clamp(min=1e-30), torch.inf)
    affine = affine_of(target.model.get_submodule(site.norm))
    slope = affine.g * sizes
    return torch.where(slope > 0, -(affine.g * bias + affine.h) / slope.clamp(min=1e-30), torch.inf)


def _exciting(
    inputs: Callable[[Subject], Pictures], patches_of: PatchesOf, *, recentring: bool = False
) -> Callable[[Subject, Strength], Attacked]:
    def run(subject: Subject, strength: Strength) -> Attacked:
        if Structure.of(subject.target) is not None:
            raise NotApplicable("a keyed lock has no detector that a patch could excite")
        target, pixels = subject.target, inputs(subject)[:PROBES]
        if len(target.input_shape) != 3:
            raise NotApplicable(f"needs images as inputs, got inputs of shape {target.input_shape}")
        ranked = suspects(analyse(target), pixels)
        if not ranked:
            raise NotApplicable("no layer whose receptive field fits into a patch has silent channels")
        tried, judges = ranked[: int(number(strength))], pixels[:JUDGES]
        best = before = judged(target, judges)
        model, change = None, None
        patches = patches_of(target, tried, subject.randomness.noise("silent channels"))
        if not patches:
            raise NotApplicable("no layer whose receptive field fits into a patch has two silent channels")
        for done, own in enumerate(patches, 1):
            centred = recentred(target, own(pixels)) if recentring else None
            if (value := judged(centred or target, judges, own)) > best:
                best, model, change = value, centred, own
            if subject.progress is not None:
                subject.progress(done, len(patches))
        figures = {"silent": len(ranked), "tried": len(tried), "information": best, "information_before": before}
        return Attacked(model, unlock=change, figures=figures | _rank(subject, ranked))

    return run


def _rank(subject: Subject, ranked: list[Suspect]) -> dict[str, float]:
    """Only for the report: the owner knows where the detector is."""
    key = subject.need_key()
    own = {(key.site, detector.channel) for detector in key.detectors}
    places = [place for place, s in enumerate(ranked, 1) if (s.site.name, s.channel) in own]
    return {"rank": places[0]} if places else {}


def _rows_by_site(target: Target, tried: list[Suspect]) -> list[tuple[Site, Tensor]]:
    """The suspects' rows as unit vectors, grouped by layer."""
    found = []
    for name in dict.fromkeys(s.site.name for s in tried):
        own = [s for s in tried if s.site.name == name]
        rows = own[0].site.rows(target.model)
        found.append((own[0].site, torch.stack([rows[s.channel] / rows[s.channel].norm() for s in own]).detach()))
    return found


def one_by_one(target: Target, tried: list[Suspect], generator: torch.Generator) -> list[Change]:
    """A patch for each suspect and position."""
    changes = []
    for site, vectors in _rows_by_site(target, tried):
        for position in dict.fromkeys([(0, 0), _inside(target, site)]):
            changes += _pasted(target, find_triggers(target, site, vectors, generator=generator, position=position))
    return changes


def two_by_two(target: Target, tried: list[Suspect], generator: torch.Generator) -> list[Change]:
    """A patch for each pair of a layer's suspects; it excites both relative to what each reaches alone."""
    changes = []
    for site, vectors in _rows_by_site(target, tried):
        pairs = list(itertools.combinations(range(len(vectors)), 2))
        if not pairs:
            continue
        for position in dict.fromkeys([(0, 0), _inside(target, site)]):
            alone = find_triggers(target, site, vectors, generator=generator, position=position)
            sizes = torch.tensor([max(found.response, 1e-12) for found in alone]).to(vectors)[:, None]
            both = torch.stack([(vectors / sizes)[list(pair)].sum(0) for pair in pairs])
            both = torch.nn.functional.normalize(both, dim=1)
            changes += _pasted(
                target, find_triggers(target, site, both, generator=generator, position=position, steps=PAIR_STEPS)
            )
    return changes


def _pasted(target: Target, triggers: list[Trigger]) -> list[Change]:
    return [pasting(target.from_bytes(found.levels), found.region) for found in triggers]


def _inside(target: Target, site: Site) -> tuple[int, ...]:
    """The first position on the diagonal that sees no padding, in steps of 8 or 4, which later strides likely keep."""
    size = tuple(axis.size for axis in site.field or ())
    for i in range(0, min(site.grid), 8 if min(site.grid) >= 28 else 4):
        if seen_region(target, site, (i, i)).size == size:
            return (i, i)
    return (0, 0)


def _synthetic(subject: Subject) -> Tensor:
    return synthetic_inputs(subject.target, PROBES, subject.randomness.noise("silent channels' inputs"))


ATTACKS = (
    Attack("excite-silent-channels", "thief", ("lock",), "nothing", (32,), _exciting(_synthetic, one_by_one),
           "try patches for channels silent on synthetic inputs; strength is how many channels"),
    Attack("excite-silent-channels-on-images", "thief", ("lock",), "images", (32,),
           _exciting(Subject.need_images, one_by_one),
           "try patches for channels silent on the thief's images; strength is how many channels"),
    Attack("excite-and-recentre", "thief", ("lock",), "nothing", (32,),
           _exciting(_synthetic, one_by_one, recentring=True),
           "try patches for silent channels, recentring logits for each; strength is how many channels"),
    Attack("excite-silent-pairs", "thief", ("lock",), "nothing", (8,), _exciting(_synthetic, two_by_two),
           "try patches for pairs of channels silent on synthetic inputs; strength is how many channels"),
)  # fmt: skip
