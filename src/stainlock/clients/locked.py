"""Suspects with a keyed lock: whose lock it is, from its public salt, and the order of the weights before locking.

A salt alone names nobody, as anyone can copy it into another file. So the lock is undone only if that brings the
weights closer to the lock's base model; weights that were never in this lock's order are read as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.clients.readings import Base
from stainlock.clients.secrets import LOCK, MasterSecret
from stainlock.clients.suspects import Suspect
from stainlock.locks.keyed.lock import salt_of
from stainlock.numerics import Randomness

_CLOSER = 0.1  # share of 1 − cosine to the base that undoing the lock must remove; by chance it is less

Copies = Callable[[], Iterable[tuple[str, int]]]


@dataclass(frozen=True)
class Locked:
    """The copy whose lock a suspect claims to have; ``model`` is the digest of its base."""

    client: str
    epoch: int
    model: str

    def seed(self, secret: MasterSecret) -> int:
        return int.from_bytes(secret.derive(LOCK, self.model, self.client, self.epoch)[:16], "big")


def lock_of(
    suspect: Suspect,
    secret: MasterSecret,
    bases: Sequence[Base],
    copies: Copies,
    salts: Callable[[str], Locked | None] | None,
) -> Locked | None:
    """Whose keyed lock the suspect has: from the registry's list of salts, or else by deriving every client's salt."""
    structure = suspect.lock
    if structure is None:
        return None
    if salts is not None and (known := salts(structure.name)) is not None:
        return known
    for base in bases:
        for client, epoch in copies():
            found = Locked(client, epoch, base.digest)
            if salt_of(Randomness(found.seed(secret))) == structure.salt:
                return found
    return None


def undone(suspect: Suspect, seed: int, base: Base | None) -> Suspect | None:
    """The suspect without the lock of this seed, or None if its weights are not in that lock's order."""
    opened = suspect.opened(seed)
    if base is None or base.target is None:  # nothing to compare with
        return opened
    state = base.target.model.state_dict()
    before, after = (_alike(one.weights, state) for one in (suspect, opened))
    return opened if after - before > _CLOSER * (1 - before) else None


def _alike(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> float:
    """The cosine similarity of two models, over the matrices and kernels that both have."""
    product = theirs_squared = ours_squared = 0.0
    for name, own in ours.items():
        other = theirs.get(name)
        if other is not None and own.dim() > 1 and other.shape == own.shape and other.is_floating_point():
            a, b = (torch.nan_to_num(t.detach().cpu().float().flatten(), posinf=0.0, neginf=0.0) for t in (other, own))
            product += float(a @ b)
            theirs_squared += float(a @ a)
            ours_squared += float(b @ b)
    return product / max(math.sqrt(theirs_squared * ours_squared), 1e-30)
