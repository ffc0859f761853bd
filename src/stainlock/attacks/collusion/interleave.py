"""Interleaving: every weight, or every whole tensor, from a member chosen at random."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.attacks.collusion.coalition import Collusion


def _weights(copies: Tensor, generator: torch.Generator) -> Tensor:
    chosen = torch.randint(len(copies), (1, *copies.shape[1:]), generator=generator)
    return copies.gather(0, chosen)[0]


def _layers(copies: Tensor, generator: torch.Generator) -> Tensor:
    return copies[int(torch.randint(len(copies), (), generator=generator))]


COLLUSIONS = (
    Collusion("interleave-weights", _weights, "every weight from a member chosen at random"),
    Collusion("interleave-layers", _layers, "every tensor from a member chosen at random"),
)
