"""Several detectors that one patch excites, and that must all be present.

A patch made for some of them excites those by more than the patch for all does. Of N detectors with responses r_i, R_i
to the patch for all, each at (r_i/R_i − ρ)/(1 − ρ) of its level where that is positive, the signal is the mean

    z = (1/N) Σ max(0, (r_i/R_i − ρ)/(1 − ρ)),        1 for the patch of all.

So patches for each alone, with responses S_i, and for all but one are searched for. The patch for all is to excite them
alike, as parts of S_i: what is excited least is soon surpassed. ρ is the firing fraction for which some of them, and
natural inputs, reach least: a high one makes much of what is above it, a low one also counts what a detector hears by
chance. A floor above what they reach is taken off the signal on its way (`conduit`). For z to pass it, one r_i at least
must pass (ρ + (1 − ρ)·floor)R_i, which is what certificates bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.errors import TriggerError
from stainlock.network.features import layer_input, respond
from stainlock.network.sites import Site
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import at
from stainlock.trigger import Trigger, find_triggers

_FIRING_FRACTIONS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
# What patches for some of the detectors may reach of the signal, since the rest must still be told from rounding; and
# how much of that rest is left to patches that are better than those found, the best of so many searches.
_HIGHEST_REACH, _LEEWAY, _SEARCHES = 0.9, 0.25, 3


@dataclass(frozen=True)
class Place:
    """Where detectors look for a patch."""

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
    """The patch for all, what each detector responds to it, their firing fraction, and the floor."""

    patch: Trigger
    responses: Tensor
    firing_fraction: float
    floor: float


def excite_together(
    place: Place,
    vectors: Tensor,
    first: Trigger,
    natural: Tensor,
    *,
    firing_fraction: float | None,
    generator: torch.Generator,
    steps: int,
) -> Together:
    """A patch for all of these detectors, which none for some of them replaces; ``first`` is a patch to begin with, and
    ``natural`` the largest natural response of each."""

    def search(directions: Tensor) -> tuple[list[Trigger], Tensor]:
        patches = place.patches(directions, generator=generator, steps=_SEARCHES * steps)
        return patches, torch.stack([place.responses(vectors, patch) for patch in patches])

    _, alone = search(vectors)
    relative = vectors / alone.diagonal()[:, None]
    (joint,), _ = search(relative.sum(0, keepdim=True))
    patch, responses = max(
        ((own, place.responses(vectors, own)) for own in (first, joint)),
        key=lambda pair: float((pair[1] / alone.diagonal()).min()),
    )
    _, but_one = search((1 - torch.eye(len(vectors), dtype=torch.float64)) @ relative)
    reached = torch.cat([natural[None], alone, but_one]) / responses
    reaches = {
        rho: float(((reached - rho) / (1 - rho)).clamp(min=0).mean(1).max())
        for rho in (_FIRING_FRACTIONS if firing_fraction is None else [firing_fraction])
    }
    rho = min(reaches, key=lambda rho: reaches[rho])
    if (reach := reaches[rho]) > _HIGHEST_REACH:
        raise TriggerError(
            f"a patch for some of the {len(vectors)} detectors at {place.site.name} would reach {reach:.2g} of the"
            " signal of all: use fewer detectors, or a site of higher dimension"
        )
    return Together(patch, responses, rho, reach + _LEEWAY * (1 - reach))
