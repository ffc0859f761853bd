"""Choosing the site of an internal lock: a small patch, a way to the logits, and a trigger that stands out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import SiteError, StainlockError
from stainlock.network.features import layer_input, respond, seen_region
from stainlock.network.network import Network
from stainlock.network.ops import never_negative
from stainlock.network.sites import Site
from stainlock.probes import synthetic_inputs
from stainlock.sphere import sample_sphere
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import raw
from stainlock.trigger import find_triggers

# A patch this small hides little of an image: at most 32×32, and a third of each side. A few pixels could be guessed.
# One that opens anywhere is larger than one for the corner, which is worth it where even that hides next to nothing.
_LARGEST_PATCH, _SMALLEST_PATCH = 32, 5
_PART_OF_SIDE, _PART_ANYWHERE = 3, 8
# As many sites as are tried out, and how hard.
_CANDIDATES, _STEPS, _PROBES = 6, 20, 4
_DETECTORS = 4
_GOOD_MARGIN = 4.0
# The size of the veto, where the part of a detector that position (0, 0) sees has size 1.
_VETO = 2.0
# Says where the signal of a site goes, or why it can't.
Place = Callable[[str], Any]


def corner(site: Site) -> tuple[int, ...]:
    return (0,) * len(site.grid)


def patch_size(target: Target, site: Site, position: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Height and width of a patch from the top left to the end of what a position sees; by default (0, 0)."""
    region = seen_region(target, site, corner(site) if position is None else position)
    return tuple(a + n for a, n in zip(region.start, region.size, strict=True))


def largest_patch(target: Target, *, anywhere: bool = False) -> int:
    """The longest side of a patch that hides little of an image."""
    return min(_LARGEST_PATCH, min(target.input_shape[1:]) // (_PART_ANYWHERE if anywhere else _PART_OF_SIDE))


def patch_problem(target: Target, site: Site, *, smooth: bool = False) -> str | None:
    """Why a site's patch can't unlock, or None. A ``smooth`` activation will do where a step makes the signal exact."""
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


def lock_sites(network: Network, place: Place, *, smooth: bool = False) -> list[Site]:
    """Sites that could hold a lock whose signal ``place`` finds a way for."""
    found = []
    for site in network.sites.values():
        if site.problem is None and patch_problem(network.target, site, smooth=smooth) is None:
            try:
                place(site.name)
            except StainlockError:
                continue
            found.append(site)
    return found


def would_do(network: Network, place: Place, *, smooth: bool = False) -> str:
    """A few sites that could hold a lock, the smallest patches first."""
    sites = lock_sites(network, place, smooth=smooth)
    sites.sort(key=lambda s: math.prod(patch_size(network.target, s)))
    return f"sites that would do: {', '.join(s.name for s in sites[:4])}" if sites else "no other site would do either"


def choose_lock_site(network: Network, place: Place, *, smooth: bool = False, detectors: int = 1) -> Site:
    """Of the sites whose trigger stands out well from inputs that need no data, the one with the smallest patch.

    A patch for several ``detectors`` excites each of them by less.
    """
    target = network.target
    sites = lock_sites(network, place, smooth=smooth)
    if not sites:
        raise SiteError(f"no site of this model can hold this lock: {_reason(network, place, smooth)}")
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
        margins |= {site.name: margin(network, site) for site in widest}
        good = [s for s in widest if margins[s.name] >= _GOOD_MARGIN * math.sqrt(detectors)]
        if good:
            return min(good, key=lambda s: (math.prod(patch_size(target, s)), -margins[s.name], s.name))
    return network.sites[max(margins, key=lambda name: (margins[name], name))]


def margin(network: Network, site: Site) -> float:
    """How many times the trigger's response is that of plain inputs, for a few detectors found in a hurry."""
    target, generator = network.target, torch.Generator().manual_seed(0)
    v = corner_detectors(network, site, _DETECTORS, np.random.default_rng(0))
    triggers = find_triggers(target, site, v, generator=generator, position=corner(site), steps=_STEPS)
    natural = natural_levels(natural_maps(target, site, v, synthetic_inputs(target, _PROBES, generator), group=0))
    return statistics.median(t.response / float(n) for t, n in zip(triggers, natural, strict=True))


def natural_maps(target: Target, site: Site, vectors: Tensor, inputs: Tensor, group: int) -> Tensor:
    """(inputs, detectors, H, W): what each detector responds, everywhere."""
    with evaluation_mode(target.model), torch.no_grad():
        return respond(site, target, layer_input(target, site, inputs), vectors, group).double().cpu()


def natural_levels(maps: Tensor) -> Tensor:
    """What a trigger must stand out from, for each detector.

    That is the largest response anywhere, and the size of those at the corner, where a veto says nothing.
    """
    anywhere, in_corner = maps.transpose(0, 1).flatten(1).amax(1), maps[..., 0, 0].abs().amax(0)
    return torch.maximum(anywhere, in_corner).clamp(min=1e-12)


def corner_detectors(network: Network, site: Site, count: int, generator: np.random.Generator) -> Tensor:
    """Detectors for position (0, 0): uniform on the sphere of those kernel elements by which it sees the map.

    The other elements meet nothing but padding there, and features everywhere else. Where features are never negative,
    these elements are all the same negative number: a veto that only the corner escapes, so that neither natural images
    nor the patch elsewhere reach the response it has there.
    """
    node, seen = network.nodes[site.name], seen_from_corner(network, site)
    v = torch.zeros(count, site.dimension, dtype=torch.float64)
    v[:, seen] = sample_sphere(count, int(seen.sum()), generator=generator)
    if not seen.all() and never_negative(network.part, node.all_input_nodes[0]):
        v[:, ~seen] = -_VETO / math.sqrt(int((~seen).sum()))
    norms: Tensor = v.norm(dim=1, keepdim=True)
    return v.div_(norms)


def seen_from_corner(network: Network, site: Site) -> Tensor:
    """The kernel's elements by which position (0, 0) sees the map, and not its padding."""
    visible = torch.zeros(raw(site.layer(network.target.model), "weight").shape[1:], dtype=torch.bool)
    first_row, first_column = network.tap(network.nodes[site.name]) or (0, 0)
    visible[:, first_row:, first_column:] = True
    return visible.flatten()


def _reason(network: Network, place: Place, smooth: bool) -> str:
    """What the most promising site lacks."""
    for site in network.sites.values():
        if site.problem is None and patch_problem(network.target, site, smooth=smooth) is None:
            try:
                place(site.name)
            except StainlockError as error:
                return str(error)
    return next((p for s in network.sites.values() if (p := patch_problem(network.target, s) or s.problem)), "none")
