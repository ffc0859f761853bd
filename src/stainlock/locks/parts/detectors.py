"""The detectors of a convolutional lock: where the patch goes, which vectors are drawn, and how loud they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stainlock.errors import TriggerError
from stainlock.locks.parts.conduit import Conduit
from stainlock.locks.parts.several import Place, excite_together
from stainlock.locks.parts.site_choice import corner, corner_detectors, natural_levels, natural_maps, seen_from_corner
from stainlock.network.features import Region
from stainlock.network.sites import Site
from stainlock.plan import DETECTOR, Write
from stainlock.probes import probe_inputs
from stainlock.randomness import Randomness
from stainlock.sphere import sample_sphere
from stainlock.stains.convolution import replace_kernel, usable_scale
from stainlock.stains.detector import LOCK_FIRING_FRACTION, Levels, Natural, typical_norm
from stainlock.target import Target
from stainlock.tensors import exact, has
from stainlock.trigger import Progress, Trigger, find_triggers


@dataclass(frozen=True)
class Found:
    """Detectors that one patch excites, and the natural responses they must stand out from."""

    vectors: Tensor
    triggers: tuple[Trigger, ...]  # the same patch, with the response of each
    natural: tuple[Natural, ...]  # of each
    firing_fraction: float  # ρ
    floor: float = 0.0  # more of the signal than patches for some of them reach

    @property
    def opening_fraction(self) -> float:
        """The part of its response to the patch that one detector must reach at least for the lock to open."""
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
    tries: int,
    progress: Progress | None,
) -> Found:
    """Draw detectors a few times, find the patch that excites all of them at once, and take those that stand out.

    One patch serves several detectors: it is the best one for their sum. A ``firing_fraction`` of None is that of
    locks, or the best one for several detectors.
    """
    site, count = conduit.site, len(conduit.detector_channels)
    group = site.group_of(conduit.detector_channels[0])
    generator = randomness.secret("detector")
    if position == corner(site):
        drawn = corner_detectors(conduit.network, site, tries * count, generator)
    else:
        drawn = sample_sphere(tries * count, site.dimension, generator=generator)
    drawn = drawn.view(tries, count, -1)
    together = torch.nn.functional.normalize(drawn.sum(1), dim=1)
    triggers = find_triggers(
        carrying, site, together, generator=randomness.noise("trigger"), group=group, position=position, steps=steps,
        progress=progress,
    )  # fmt: skip
    inputs = probe_inputs(carrying, "lock responses")
    maps = natural_maps(carrying, site, drawn.flatten(0, 1), inputs, group)
    natural = natural_levels(maps).view(tries, count)
    place = Place(carrying, site, position, group)
    responses = torch.stack([place.responses(v, t) for v, t in zip(drawn, triggers, strict=True)])
    margins = (responses / natural).amin(1)
    best = int(margins.argmax())
    several = count > 1 and conduit.floor_stage is not None
    if margins[best] * (LOCK_FIRING_FRACTION if several or firing_fraction is None else firing_fraction) <= 1:
        weakest = int((responses[best] / natural[best]).argmin())
        raise TriggerError(
            f"the patch's response at {site.name} is {responses[best, weakest]:.3g}, not far enough above the"
            f" {natural[best, weakest]:.3g} of plain inputs: use a site of higher dimension, more steps or tries, or"
            " fewer detectors"
        )
    patch, own, rho, floor = triggers[best], responses[best], firing_fraction or LOCK_FIRING_FRACTION, 0.0
    if several:
        found = excite_together(
            place, drawn[best], patch, natural[best], firing_fraction=firing_fraction,
            generator=randomness.noise("triggers of some"), steps=steps,
        )  # fmt: skip
        patch, own, rho, floor = found.patch, found.responses, found.firing_fraction, found.floor
    patch = _from_corner(carrying, patch)
    own_maps = maps.transpose(0, 1).unflatten(0, (tries, count))[best]
    levels = tuple(
        replace(Natural.of(own), largest=float(level)) for own, level in zip(own_maps, natural[best], strict=True)
    )
    return Found(drawn[best], tuple(replace(patch, response=float(r)) for r in own), levels, rho, floor)


def _from_corner(target: Target, trigger: Trigger) -> Trigger:
    """The patch from the top left corner on, so that its pixels alone say where it goes."""
    region = trigger.region
    size = tuple(a + n for a, n in zip(region.start, region.size, strict=True))
    whole = Region((0,) * len(size), size)
    return Trigger(whole.cut(trigger.image(target)).clone(), whole, trigger.response)


def free_part(conduit: Conduit, vector: Tensor, position: tuple[int, ...]) -> dict[str, float]:
    """Of how many elements, and of what size, the random part of a detector is: what a certificate needs."""
    free = vector
    if position == corner(conduit.site):
        free = vector[seen_from_corner(conduit.network, conduit.site)]
    return {"free_dimension": len(free), "free_size": float(free.norm())}


def first_whole_position(target: Target, site: Site, stride: int) -> tuple[int, ...]:
    """The first position, of those that a stride keeps, whose field lies within the image: it sees no padding."""
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


def choose_levels(target: Target, conduit: Conduit, found: Found) -> list[Levels]:
    """Δ and δ of each detector: rows of typical size, with no activation on the way capped by their signal.

    In disguise a row is smaller, half way to where its threshold would be one of the biases that the layer has: what
    the detector lacks, the layer that reads it must make up for.
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
    """How far below the typical size the layer's own rows go."""
    norms = site.rows(target.model).detach().double().norm(dim=1)
    return float(norms.quantile(0.05) / norms.median())


def detector_writes(target: Target, conduit: Conduit, found: Found, levels: list[Levels]) -> list[Write]:
    """Line 2: Algorithm 2 for each detector."""
    return [
        w
        for channel, v, own, natural in zip(
            conduit.detector_channels, found.vectors, levels, found.natural, strict=True
        )
        for w in replace_kernel(target.model, conduit.site, channel, v, own, natural)
    ]


def patched_inputs(target: Target, trigger: Trigger) -> Tensor:
    """The patch on images that are otherwise arbitrary: the signal must not depend on them."""
    images = probe_inputs(target, "patched")
    return trigger.region.paste(target.from_bytes(trigger.levels), images)
