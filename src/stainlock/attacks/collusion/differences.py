"""Where copies differ there is a mark: take it out there.

Fingerprints are in every weight, so that all copies differ nearly everywhere, and what is zeroed is the model. The
thief therefore picks the share of weights where copies differ most, relative to the tensor's own deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.collusion.coalition import Collusion

_SHARE = 0.2  # of the weights, those that differ most


def _differing(copies: Tensor) -> Tensor:
    spread = (copies.amax(0) - copies.amin(0)).flatten()
    count = max(1, int(_SHARE * spread.numel()))
    return (spread >= spread.topk(count).values[-1]).view(copies.shape[1:]) & (spread > 0).view(copies.shape[1:])


def _zeroed(copies: Tensor, generator: torch.Generator) -> Tensor:
    return torch.where(_differing(copies), 0.0, copies[0])


def _noise(copies: Tensor, generator: torch.Generator) -> Tensor:
    """Noise within what the copies have there, around their average."""
    low, high = copies.amin(0), copies.amax(0)
    noise = low + (high - low) * torch.rand(low.shape, generator=generator)
    return torch.where(_differing(copies), noise, copies[0])


def _all_noise(copies: Tensor, generator: torch.Generator) -> Tensor:
    """Noise between the least and the greatest everywhere."""
    low, high = copies.amin(0), copies.amax(0)
    return low + (high - low) * torch.rand(low.shape, generator=generator)


COLLUSIONS = (
    Collusion("differences-zeroed", _zeroed, "the fifth of the weights where copies differ most set to zero"),
    Collusion("differences-to-noise", _noise, "that fifth set to noise within what the copies have"),
    Collusion("noise-between", _all_noise, "every weight at random between the least and the greatest"),
)
