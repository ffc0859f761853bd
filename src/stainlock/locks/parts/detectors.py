"""The detectors of a convolutional lock: where they look for the patch, how they are drawn, and their levels.

One patch may have to excite several detectors. A patch made for only some of them excites those more than the patch for
all does. With N detectors, responses r_i, and responses R_i to the patch for all, each detector reaches
(r_i/R_i − ρ)/(1 − ρ) of its level if that is positive, and the signal is the mean

    z = (1/N) Σ max(0, (r_i/R_i − ρ)/(1 − ρ)),        1 for the patch for all.

So partial patches are searched for: for each detector alone, with responses S_i, and for all but one. The patch for all
is chosen to excite the detectors equally relative to S_i, since the least excited one is the easiest to surpass. ρ is
the firing fraction at which partial patches and natural inputs reach the least signal: a high one amplifies what is
above it, a low one also counts chance responses. A floor above what they reach is subtracted from the signal on its way
(`Conduit.floor`). For z to pass the floor, at least one r_i must pass (ρ + (1 − ρ)·floor)R_i; certificates bound that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import TriggerError
from stainlock.key import Detector
from stainlock.locks.parts.conduit import Conduit
from stainlock.network.network import Network, Site, layer_input, respond
from stainlock.network.ops import never_negative
from stainlock.numerics import Randomness, at, exact, has, raw, sample_sphere
from stainlock.plan import DETECTOR, Write
from stainlock.stains.convolution import replace_kernel, usable_scale
from stainlock.stains.detector import LOCK_FIRING_FRACTION, Levels, Natural, typical_norm
from stainlock.target import Region, Target, evaluation_mode, probe_inputs
from stainlock.trigger import Progress, Trigger, find_triggers, seen_region

Place = Literal["any", "corner", "anywhere"]
# Largest side of a patch: 32 pixels and a third of the image's side; an eighth for a patch that opens anywhere, which
# is larger than one for the corner and worthwhile only if it still hides very little.
_LARGEST_PATCH, _PART_OF_SIDE, _PART_ANYWHERE = 32, 3, 8
# The norm of the veto, relative to the part of a detector that position (0, 0) sees.
_VETO = 2.0
_FIRING_FRACTIONS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
# Fraction of the signal that partial patches may reach at most: the rest must be well above rounding. Fraction of that
# rest reserved for better partial patches than those found. Number of searches, of which the best patch is taken.
_HIGHEST_REACH, _LEEWAY, _SEARCHES = 0.9, 0.25, 3


def corner(site: Site) -> tuple[int, ...]:
    return (0,) * len(site.grid)


def patch_size(target: Target, site: Site, position: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Height and width of the patch that starts at the top left and covers what a position sees; by default (0, 0)."""
    region = seen_region(target, site, corner(site) if position is None else position)
    return tuple(a + n for a, n in zip(region.start, region.size, strict=True))


def largest_patch(target: Target, *, anywhere: bool = False) -> int:
    """The longest side of a patch that hides little of an image."""
    return min(_LARGEST_PATCH, min(target.input_shape[1:]) // (_PART_ANYWHERE if anywhere else _PART_OF_SIDE))


def patch_position(conduit: Conduit, place: Place) -> tuple[int, ...]:
    """Where detectors of a lock without logits look for the patch: at the corner, or where they see no padding.

    In the second case the patch opens the gates at every position that is aligned with the stride.
    """
    site, network = conduit.site, conduit.network
    if place == "corner":
        return corner(site)
    stride = max(round(site.grid[0] / network.shapes[block.squeezed][2]) for block in conduit.blocks)
    position = first_whole_position(network.target, site, stride)
    too_large = max(patch_size(network.target, site, position)) > largest_patch(network.target, anywhere=True)
    return corner(site) if too_large and place == "any" else position


def first_whole_position(target: Target, site: Site, stride: int) -> tuple[int, ...]:
    """The first position, among multiples of the stride, whose receptive field is within the image, without padding."""
    assert site.field is not None
    found = []
    for axis, length, pixels in zip(site.field, site.grid, target.input_shape[1:], strict=True):
        inside = [
            i for i in range(0, length, stride) if i * axis.jump + axis.start >= 0
            and i * axis.jump + axis.start + axis.size <= pixels
        ]  # fmt: skip
        if not inside:
            return corner(site)
        found.append(inside[0])
    return tuple(found)


def natural_maps(target: Target, site: Site, vectors: Tensor, inputs: Tensor, group: int) -> Tensor:
    """Each detector's responses at every position: (inputs, detectors, H, W)."""
    with evaluation_mode(target.model), torch.no_grad():
        return respond(site, target, layer_input(target, site, inputs), vectors, group).double().cpu()


def natural_levels(maps: Tensor) -> Tensor:
    """The level from which a trigger must stand out, for each detector.

    That is the largest response anywhere, or the largest absolute one at the corner, where a veto does not act.
    """
    anywhere, in_corner = maps.transpose(0, 1).flatten(1).amax(1), maps[..., 0, 0].abs().amax(0)
    return torch.maximum(anywhere, in_corner).clamp(min=1e-12)


def corner_detectors(network: Network, site: Site, count: int, generator: np.random.Generator) -> Tensor:
    """Detectors for position (0, 0): uniform on the sphere of the kernel elements that see the map there.

    The other elements see only padding at the corner, and features everywhere else. If features are never negative,
    these elements are one negative constant: a veto everywhere except at the corner. Neither natural images nor the
    patch in another place then reach the response that the patch has at the corner.
    """
    node, seen = network.nodes[site.name], seen_from_corner(network, site)
    v = torch.zeros(count, site.dimension, dtype=torch.float64)
    v[:, seen] = sample_sphere(count, int(seen.sum()), generator=generator)
    if not seen.all() and never_negative(network.part, node.all_input_nodes[0]):
        v[:, ~seen] = -_VETO / math.sqrt(int((~seen).sum()))
    norms: Tensor = v.norm(dim=1, keepdim=True)
    return v.div_(norms)


def seen_from_corner(network: Network, site: Site) -> Tensor:
    """Which elements of the kernel see the map, rather than its padding, at position (0, 0)."""
    visible = torch.zeros(raw(site.layer(network.target.model), "weight").shape[1:], dtype=torch.bool)
    first_row, first_column = network.tap(network.nodes[site.name]) or (0, 0)
    visible[:, first_row:, first_column:] = True
    return visible.flatten()


@dataclass(frozen=True)
class Found:
    """Detectors that one patch excites, and the natural responses they must stand out from."""

    vectors: Tensor
    triggers: tuple[Trigger, ...]  # the same patch, with the response of each
    natural: tuple[Natural, ...]  # of each
    firing_fraction: float  # ρ
    floor: float = 0.0  # above the signal that patches for only some of them reach

    @property
    def opening_fraction(self) -> float:
        """The fraction of its response to the patch that at least one detector must reach for the lock to open."""
        return self.firing_fraction + (1 - self.firing_fraction) * self.floor

    @property
    def patch(self) -> Trigger:
        return self.triggers[0]


def find_detectors(
    carrying: Target,
    conduit: Conduit,
    position: tuple[int, ...],
    randomness: Randomness,
    *,
    firing_fraction: float | None,
    steps: int,
    restarts: int,
    progress: Progress | None,
) -> Found:
    """Draw sets of detectors, find for each the patch that excites all of them, and take the set that stands out most.

    With several detectors, the first search maximises the response of their sum. The default ``firing_fraction`` is
    `LOCK_FIRING_FRACTION`, or the best one if there are several detectors.
    """
    site, count = conduit.site, len(conduit.detector_channels)
    group = site.group_of(conduit.detector_channels[0])
    generator = randomness.secret("detector")
    if position == corner(site):
        drawn = corner_detectors(conduit.network, site, restarts * count, generator)
    else:
        drawn = sample_sphere(restarts * count, site.dimension, generator=generator)
    drawn = drawn.view(restarts, count, -1)
    together = torch.nn.functional.normalize(drawn.sum(1), dim=1)
    triggers = find_triggers(
        carrying, site, together, generator=randomness.noise("trigger"), group=group, position=position, steps=steps,
        progress=progress,
    )  # fmt: skip
    inputs = probe_inputs(carrying, "lock responses")
    maps = natural_maps(carrying, site, drawn.flatten(0, 1), inputs, group)
    natural = natural_levels(maps).view(restarts, count)
    look = Search(carrying, site, position, group)
    responses = torch.stack([look.responses(v, t) for v, t in zip(drawn, triggers, strict=True)])
    margins = (responses / natural).amin(1)
    best = int(margins.argmax())
    several = count > 1 and conduit.floor_stage is not None
    if margins[best] * (LOCK_FIRING_FRACTION if several or firing_fraction is None else firing_fraction) <= 1:
        weakest = int((responses[best] / natural[best]).argmin())
        raise TriggerError(
            f"the patch's response at {site.name} is {responses[best, weakest]:.3g}, not far enough above the"
            f" {natural[best, weakest]:.3g} of plain inputs: use a site of higher dimension, more steps or restarts, or"
            " fewer detectors"
        )
    patch, own, rho, floor = triggers[best], responses[best], firing_fraction or LOCK_FIRING_FRACTION, 0.0
    if several:
        found = excite_together(
            look, drawn[best], patch, natural[best], firing_fraction=firing_fraction,
            generator=randomness.noise("triggers of some"), steps=steps,
        )  # fmt: skip
        patch, own, rho, floor = found.patch, found.responses, found.firing_fraction, found.floor
    patch = _from_corner(carrying, patch)
    own_maps = maps.transpose(0, 1).unflatten(0, (restarts, count))[best]
    levels = tuple(
        replace(Natural.of(own), largest=float(level)) for own, level in zip(own_maps, natural[best], strict=True)
    )
    return Found(drawn[best], tuple(replace(patch, response=float(r)) for r in own), levels, rho, floor)


def _from_corner(target: Target, trigger: Trigger) -> Trigger:
    """The patch extended to the top left corner, so that it needs no coordinates."""
    region = trigger.region
    size = tuple(a + n for a, n in zip(region.start, region.size, strict=True))
    whole = Region((0,) * len(size), size)
    return Trigger(whole.cut(trigger.image(target)).clone(), whole, trigger.response)


@dataclass(frozen=True)
class Search:
    """The position at which detectors look for a patch."""

    target: Target
    site: Site
    position: tuple[int, ...]
    group: int

    def patches(self, directions: Tensor, *, generator: torch.Generator, steps: int) -> list[Trigger]:
        """The best patch of several searches for each direction."""
        return find_triggers(
            self.target, self.site, torch.nn.functional.normalize(directions, dim=1), generator=generator,
            group=self.group, position=self.position, steps=steps, restarts=_SEARCHES,
        )  # fmt: skip

    def responses(self, vectors: Tensor, patch: Trigger) -> Tensor:
        with evaluation_mode(self.target.model), torch.no_grad():
            features = layer_input(self.target, self.site, patch.pixels(self.target))
            return at(respond(self.site, self.target, features, vectors, self.group)[0], self.position).double().cpu()


@dataclass(frozen=True)
class Together:
    """The patch for all detectors, their responses to it, their firing fraction, and the floor."""

    patch: Trigger
    responses: Tensor
    firing_fraction: float
    floor: float


def excite_together(
    search: Search,
    vectors: Tensor,
    first: Trigger,
    natural: Tensor,
    *,
    firing_fraction: float | None,
    generator: torch.Generator,
    steps: int,
) -> Together:
    """A patch for all detectors, and a floor that patches for only some of them do not pass.

    ``first`` is a patch for all that was found before, ``natural`` the largest natural response of each detector.
    """

    def best_patches(directions: Tensor) -> tuple[list[Trigger], Tensor]:
        patches = search.patches(directions, generator=generator, steps=_SEARCHES * steps)
        return patches, torch.stack([search.responses(vectors, patch) for patch in patches])

    _, alone = best_patches(vectors)
    relative = vectors / alone.diagonal()[:, None]
    (joint,), _ = best_patches(relative.sum(0, keepdim=True))
    patch, responses = max(
        ((own, search.responses(vectors, own)) for own in (first, joint)),
        key=lambda pair: float((pair[1] / alone.diagonal()).min()),
    )
    _, but_one = best_patches((1 - torch.eye(len(vectors), dtype=torch.float64)) @ relative)
    reached = torch.cat([natural[None], alone, but_one]) / responses
    reaches = {
        rho: float(((reached - rho) / (1 - rho)).clamp(min=0).mean(1).max())
        for rho in (_FIRING_FRACTIONS if firing_fraction is None else [firing_fraction])
    }
    rho = min(reaches, key=lambda rho: reaches[rho])
    if (reach := reaches[rho]) > _HIGHEST_REACH:
        raise TriggerError(
            f"a patch for some of the {len(vectors)} detectors at {search.site.name} would reach {reach:.2g} of the"
            " signal of all: use fewer detectors, or a site of higher dimension"
        )
    return Together(patch, responses, rho, reach + _LEEWAY * (1 - reach))


def free_part(conduit: Conduit, vector: Tensor, position: tuple[int, ...]) -> dict[str, float]:
    """Dimension and norm of a detector's random part, which certificates need."""
    free = vector
    if position == corner(conduit.site):
        free = vector[seen_from_corner(conduit.network, conduit.site)]
    return {"free_dimension": len(free), "free_size": float(free.norm())}


def records(target: Target, conduit: Conduit, found: Found, levels: Sequence[Levels]) -> tuple[Detector, ...]:
    """The detectors as the key stores them, with the rows of the original model."""
    rows = conduit.site.rows(target.model)
    return tuple(
        Detector(v, channel, trigger, own.trigger, own.rest, rows[channel].detach().cpu().clone())
        for v, channel, trigger, own in zip(
            found.vectors, conduit.detector_channels, found.triggers, levels, strict=True
        )
    )


def choose_levels(target: Target, conduit: Conduit, found: Found) -> list[Levels]:
    """Δ and δ of each detector: rows of typical size, and a signal that no activation on the way caps.

    With a disguise rows are smaller, halfway to the size at which the threshold would be no larger than the layer's
    own biases; the next layer amplifies the signal accordingly.
    """
    site, levels, firing_fraction = conduit.site, [], found.firing_fraction
    assert site.activation is not None
    for channel, trigger in zip(conduit.detector_channels, found.triggers, strict=True):
        slope = abs(usable_scale(target.model, site.norm, channel, DETECTOR)[0]) * typical_norm(target, site)
        own = Levels.from_slope(slope, trigger.response, site.activation, firing_fraction)
        if not conduit.disguise.bare:
            shrink = max(_smallest_row(target, site), min(1.0, _largest_bias(target, site) / abs(own.rest)) ** 0.5)
            own = Levels.from_slope(slope * shrink, trigger.response, site.activation, firing_fraction)
        if own.trigger > conduit.ceiling():
            own = Levels.from_trigger(conduit.ceiling(), trigger.response, site.activation, firing_fraction)
        levels.append(own)
    return levels


def _largest_bias(target: Target, site: Site) -> float:
    module = target.model.get_submodule(site.norm or site.name)
    return float(exact(module, "bias").abs().max()) if has(module, "bias") else float("inf")


def _smallest_row(target: Target, site: Site) -> float:
    """The layer's small rows (the 5 % quantile of norms) relative to its median."""
    norms = site.rows(target.model).detach().double().norm(dim=1)
    return float(norms.quantile(0.05) / norms.median())


def detector_writes(target: Target, conduit: Conduit, found: Found, levels: list[Levels]) -> list[Write]:
    """Algorithm 2 for each detector."""
    return [
        w
        for channel, v, own, natural in zip(
            conduit.detector_channels, found.vectors, levels, found.natural, strict=True
        )
        for w in replace_kernel(target.model, conduit.site, channel, v, own, natural)
    ]


def patched_inputs(target: Target, trigger: Trigger) -> Tensor:
    """Synthetic inputs with the patch; the signal must not depend on the rest of the image."""
    images = probe_inputs(target, "patched")
    return trigger.region.paste(target.from_bytes(trigger.levels), images)
