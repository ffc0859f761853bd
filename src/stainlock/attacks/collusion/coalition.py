"""What a coalition does: merges several copies of one model into one, tensor by tensor.

A new way to collude is one file beside this one that defines a `COLLUSION` (or several `COLLUSIONS`);
`stainlock.attacks.catalogue.all_collusions` collects them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.fingerprints.alignment import align
from stainlock.numerics import Randomness
from stainlock.target import Target

Merge = Callable[[Tensor, torch.Generator], Tensor]  # copies of one tensor (K, *shape) into one (*shape)


@dataclass(frozen=True)
class Collusion:
    """One way to merge copies: ``merge`` takes all copies of a tensor. With ``aligns``, the copies are first aligned
    with the first one in order and scale, in case their channels were permuted or rescaled."""

    name: str
    merge: Merge
    about: str
    aligns: bool = False
    group: str = "collusion"


def collude(copies: Sequence[Target], collusion: Collusion, seed: int = 0) -> Target:
    """The coalition's file: every floating-point tensor merged, everything else from the first member."""
    if not copies:
        raise ValueError("expected at least one copy, got none")
    states = [copy.model.state_dict() for copy in copies]
    if collusion.aligns:
        states = [states[0], *({**state, **align(state, states[0]).weights} for state in states[1:])]
    merged = copies[0].copy()
    with torch.no_grad():
        for name, tensor in merged.model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(merge_tensor(name, [state.get(name) for state in states], collusion, seed))
    return merged


def merge_tensor(name: str, held: Sequence[Tensor | None], collusion: Collusion, seed: int) -> Tensor:
    """One tensor of the coalition's file."""
    shapes = {None if tensor is None else tuple(tensor.shape) for tensor in held}
    if len(shapes) != 1 or None in shapes:
        raise ModelError(f"the copies differ in structure, at {name}: expected copies of one model")
    stack = torch.stack([tensor.detach().cpu().float() for tensor in held if tensor is not None])
    return collusion.merge(stack, Randomness(seed).noise(f"{collusion.name} {name}"))


def merge_states(states: Sequence[Mapping[str, Tensor]], collusion: Collusion, seed: int = 0) -> dict[str, Tensor]:
    """Merges plain weights by name; every member must have all tensors of the first."""
    return {name: merge_tensor(name, [state.get(name) for state in states], collusion, seed) for name in states[0]}
