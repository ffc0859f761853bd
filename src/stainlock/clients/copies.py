"""A client's copy: the base model with a fingerprint, and optionally a stain and a lock of the client's own.

    copy = lock(stain(fingerprint(base)))

Everything random in it comes from the copy's secrets, so the same client and epoch always give the same copy. The
fingerprint comes first: the stain then overwrites a few of the marked weights, and a keyed lock only reorders them.
"""

from __future__ import annotations

from dataclasses import dataclass

from stainlock.clients.secrets import CopySecrets
from stainlock.fingerprints import Layout, fingerprint_plan
from stainlock.gating.structure import Structure
from stainlock.html.images import png
from stainlock.key import Key
from stainlock.locks.lock import lock
from stainlock.stains.stain import stain
from stainlock.target import Target
from stainlock.unlocking.noise import trigger_bytes


@dataclass(frozen=True)
class Protection:
    """What a copy has besides its fingerprint: whether it is stained, and the kind of its lock, if any."""

    stain: bool = False
    lock: str | None = None

    def __str__(self) -> str:
        parts = [*(["a stain"] if self.stain else []), *([f"a lock ({self.lock})"] if self.lock else [])]
        return " and ".join(parts) or "neither stain nor lock"


@dataclass(frozen=True)
class Copy:
    """A client's model, and the owner's keys to its stain and lock."""

    target: Target
    stain_key: Key | None = None
    lock_key: Key | None = None

    @property
    def salt(self) -> str | None:
        """The keyed lock's salt: public in the file, and different in every copy."""
        return structure.name if (structure := Structure.of(self.target)) is not None else None

    @property
    def patch(self) -> tuple[str, bytes] | None:
        """The file with which the client opens the lock: its suffix and content."""
        if self.lock_key is None:
            return None
        if self.lock_key.carrier == "entries":
            return ".safetensors", trigger_bytes(self.lock_key)
        return ".png", png(self.lock_key.detectors[0].trigger.levels)


def make_copy(base: Target, layout: Layout, secrets: CopySecrets, protection: Protection) -> Copy:
    target = fingerprint_plan(base, layout, secrets.fingerprint).apply(base)
    stain_key = lock_key = None
    if protection.stain:
        target, stain_key = stain(target, seed=secrets.stain_seed)
    if protection.lock is not None:
        target, lock_key = lock(target, kind=protection.lock, seed=secrets.lock_seed)
    return Copy(target, stain_key, lock_key)
