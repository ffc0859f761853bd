"""The owner's own model, to compare a suspect with.

The key alone is enough to verify, but with the model it was made for, two checks become more sensitive. Responses of
the suspect are explained by the inputs of our own layer, whatever the inputs of the suspect's layer are. And the inputs
of the suspect's layer can be matched with ours, channel by channel, which undoes a permutation, rescaling or widening
of the layers before it. Both use features of our model, which a forger could make up. So it must be the very model that
the key names, before or after it was stained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from stainlock.certificates.certificate import site_of_key
from stainlock.certificates.decoys import find_decoys
from stainlock.key import Key
from stainlock.network.network import Site, layer_input
from stainlock.numerics import is_model
from stainlock.target import Target, evaluation_mode, whole_input
from stainlock.trigger import Progress, Trigger

_MOST_CHANNELS = 4096  # the time for an assignment grows with the cube of this
_SAMPLES = 20_000
_RELATED = 0.5  # channels whose features correlate less than this are not matched


@dataclass(frozen=True)
class Reference:
    """The owner's model, protected or original, and decoys found in it. Create it once for many suspects.

    >>> mine = sl.Reference.of(stained, key, decoys=20)
    >>> sl.verify(stained, key, reference=mine).stained
    True
    """

    base: Target
    site: Site
    decoys: tuple[Trigger, ...] = ()
    on_the_way: Callable[[Tensor], Tensor] | None = None  # changes to pictures before the suspect sees them

    @staticmethod
    def of(base: Target, key: Key, *, decoys: int | None = None, progress: Progress | None = None) -> Reference:
        """The owner's model, and decoys to match channels with: triggers of other detectors, found as the key's were.

        Without decoys (``decoys=0``) channels are not matched, but responses are still explained by our model.

        >>> len(sl.Reference.of(stained, key, decoys=20).decoys)
        20
        """
        if not any(is_model(base.model, digest) for digest in (key.base_digest, key.protected_digest)):
            raise ValueError(
                "expected the model that the key was made for as reference, stained or not, got another: with features"
                " of an arbitrary model a claim could be forged"
            )
        site = site_of_key(base, key)
        found = [] if decoys == 0 else find_decoys(base, site, key, decoys, progress)
        return Reference(base, site, tuple(found))


@dataclass(frozen=True)
class Matching:
    """Which input channels of the suspect's layer match which of ours: φ̂_theirs ≈ factor·φ_ours for those that do."""

    ours: Tensor
    theirs: Tensor
    factors: Tensor
    channels: int  # of our layer's input

    def rows(self, site: Site, model: nn.Module) -> Tensor:
        """The suspect's rows, converted for our model's features as input."""
        rows = site.rows(model).double().cpu()
        layer = site.layer(model)
        given = int(getattr(layer, "in_channels", 0) or getattr(layer, "in_features", 0))
        rows = rows.view(len(rows), given, -1)
        matched = rows.new_zeros(len(rows), self.channels, rows.shape[2])
        matched[:, self.ours] = rows[:, self.theirs] * self.factors.view(1, -1, 1)
        return matched.flatten(1)

    def features(self, site: Site, given: Tensor) -> Tensor:
        """Our layer's input, reconstructed from the input of the suspect's."""
        axis = -1 if site.kind == "linear" else 1
        theirs = given.double().cpu().movedim(axis, 0)
        matched = theirs.new_zeros(self.channels, *theirs.shape[1:])
        matched[self.ours] = theirs[self.theirs] / self.factors.view(-1, *(1,) * (theirs.dim() - 1))
        return matched.movedim(0, axis)


def match(suspect: Target, site: Site, reference: Reference) -> Matching | None:
    """Match each input channel of our layer with one of the suspect's; None if that is not possible.

    Both models run on the decoys, which are independent of the key's v. Channels are assigned so that the sum of their
    correlations is largest.
    """
    if not reference.decoys:
        return None
    ours, theirs = (_by_channel(t, s, reference.decoys) for t, s in ((reference.base, reference.site), (suspect, site)))
    if max(len(ours), len(theirs)) > _MOST_CHANNELS or site.groups > 1 or ours.shape[1] != theirs.shape[1]:
        return None
    covariance = ours @ theirs.T
    size, other = ours.norm(dim=1), theirs.norm(dim=1)
    correlation = torch.nan_to_num(covariance / (size[:, None] * other).clamp(min=1e-30))
    mine, match = (torch.from_numpy(index) for index in linear_sum_assignment(-correlation.numpy()))
    related = correlation[mine, match] > _RELATED
    mine, match = mine[related], match[related]
    return Matching(mine, match, covariance[mine, match] / size[mine].square(), len(ours))


def _by_channel(target: Target, site: Site, decoys: tuple[Trigger, ...]) -> Tensor:
    """The layer's input for the decoys: ``(channels, samples)``, with the mean of each channel subtracted."""
    found = []
    with evaluation_mode(target.model), torch.no_grad():
        for decoy in decoys:
            features = layer_input(target, site, decoy.pixels(target)).double().cpu()
            features = features.movedim(-1, 1) if site.kind == "linear" else features
            found.append(features.flatten(2) if features.dim() > 2 else features[..., None])
    samples = torch.cat(found).movedim(1, 0).flatten(1)
    samples = samples[:, :: max(1, samples.shape[1] // _SAMPLES)]
    return samples - samples.mean(1, keepdim=True)


def with_other_images(key: Key, reference: Reference, change: Callable[[Tensor], Tensor]) -> tuple[Key, Reference]:
    """The same with every trigger and decoy changed as pictures are in transmission: compressed, resized, cropped."""

    def changed(trigger: Trigger) -> Trigger:
        pixels = change(trigger.pixels(reference.base))
        return Trigger(reference.base.to_bytes(pixels[0]), whole_input(reference.base), trigger.response)

    detectors = tuple(replace(d, trigger=changed(d.trigger)) for d in key.detectors)
    changed_decoys = tuple(map(changed, reference.decoys))
    return replace(key, detectors=detectors), replace(reference, decoys=changed_decoys, on_the_way=change)
