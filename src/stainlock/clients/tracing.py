"""Tracing: which clients' copies a suspect was made from.

    1   undo the suspect's keyed lock, if its salt, which is public, is one of ours
    2   compare its weights with each registered base model and fold the differences onto the chips
    3   score every client in every epoch; with N codes and M base models a client is named if

            p = M · 4N · exp(−z²/2) ≤ level

A salt alone names nobody: anyone can copy it into another file. It only helps to restore the order of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stainlock.clients.evidence import Accused
from stainlock.clients.locked import Copies, Locked, lock_of, undone
from stainlock.clients.readings import Base, read_base
from stainlock.clients.secrets import FINGERPRINT, LAYOUT, MasterSecret, checked_name
from stainlock.clients.suspects import read_suspect
from stainlock.fingerprints import trace as trace_codes
from stainlock.fingerprints.layout import AMPLITUDE, CHIPS
from stainlock.fingerprints.tracing import LEVEL
from stainlock.numerics import model_digest
from stainlock.target import Target

_SHOWN = 3


@dataclass(frozen=True)
class Compared:
    """The comparison with one base model. ``scores`` has all clients' scores in the first round.

    ``mixed_in`` lists the digests of other base models whose share in the suspect was removed first.
    """

    model: str
    digest: str
    weights: int
    carrying: int
    missing: dict[str, str]
    blind: bool
    scores: NDArray[np.float64] = field(repr=False)
    mixed_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """``clients`` are those named, most certain first. ``tested`` counts codes: one per client, epoch and base."""

    verdict: str
    clients: tuple[Accused, ...]
    tested: int
    chips: int
    level: float
    threshold: float
    suspect: str
    suspect_digest: str
    compared: tuple[Compared, ...]
    lock: Locked | None = None  # whose keyed lock was undone before comparing
    note: str = ""
    identical: tuple[str, int] | None = None  # whose copy this is, bit for bit, by the registry

    def facts(self) -> dict[str, Any]:
        """All fields except the scores, as JSON."""
        clients = [asdict(accused) for accused in self.clients]
        compared = [{"model": c.model, "digest": c.digest, "weights": c.weights, "carrying": c.carrying,
                     "missing": c.missing, "blind": c.blind, "mixed_in": list(c.mixed_in)}
                    for c in self.compared]  # fmt: skip
        lock_of = [self.lock.client, self.lock.epoch] if self.lock else None
        return {
            "verdict": self.verdict, "clients": clients, "tested": self.tested, "chips": self.chips,
            "level": self.level, "threshold": self.threshold, "suspect_digest": self.suspect_digest,
            "compared": compared, "lock_of": lock_of, "note": self.note,
            "identical": list(self.identical) if self.identical else None,
        }  # fmt: skip


def trace(
    suspect: Any,
    secret: MasterSecret,
    bases: Sequence[Base],
    copies: Copies,
    *,
    level: float = LEVEL,
    salts: Callable[[str], Locked | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Whose copy is this? ``copies`` yields every client with every epoch; ``salts`` looks up whose lock a salt is."""
    if not 0 < level < 1:
        raise ValueError(f"expected a level between 0 and 1, got {level}")
    found = read_suspect(suspect)
    digest = found.digest
    lock = lock_of(found, secret, bases, copies, salts)
    copied_lock = ""
    if lock is not None:
        its_base = next((base for base in bases if base.digest == lock.model), None)
        opened = undone(found, lock.seed(secret), its_base)
        if opened is None:
            copied_lock = (
                f"it names the lock of {lock.client}, epoch {lock.epoch}, but its weights are in another order"
            )
            lock = None
        else:
            found = opened
    names = list(copies())
    if not names:
        raise ValueError("expected clients to trace among, got none: `stainlock clients add` adds them")
    compared, accused, threshold = [], [], 0.0
    for number, base in enumerate(bases):
        reading, mixed_in = read_base(found, base, secret.derive(LAYOUT, base.digest), bases)
        secrets = secret.derive_many(FINGERPRINT, base.digest, names)
        traced = trace_codes(reading, secrets, level, clients=len(names) * len(bases))
        threshold = traced.threshold
        compared.append(
            Compared(base.label, base.digest, reading.compared, reading.carrying, dict(reading.missing),
                     reading.blind, traced.scores, mixed_in)
        )  # fmt: skip
        for one in traced.accused:
            client, epoch = names[one.client]
            accused.append(Accused(client, epoch, base.label, one.z, one.p_value, one.log10_p_value))
        if progress is not None:
            progress(number + 1, len(bases))
    accused.sort(key=lambda a: a.log10_p_value)
    return Trace(
        "traced" if accused else "none", tuple(accused), len(names) * len(bases), bases[0].chips, level, threshold,
        found.name, digest, tuple(compared), lock,
        "; ".join(note for note in (copied_lock, _note(compared, threshold, named=bool(accused))) if note),
    )  # fmt: skip


def trace_names(
    suspect: Any,
    secret: MasterSecret,
    base: Target,
    names: Sequence[str],
    *,
    epochs: int = 1,
    level: float = LEVEL,
    chips: int = CHIPS,
    amplitude: float = AMPLITUDE,
) -> Trace:
    """The same without a registry: the master secret, the base model and a list of names are enough.

    ``chips`` and ``amplitude`` must be those with which the model was registered.
    """
    digest = model_digest(base.model)
    known = Base("the base model", digest, chips, amplitude, base)
    clients = list(dict.fromkeys(checked_name(name) for name in names))

    def copies() -> Iterable[tuple[str, int]]:
        return ((name, epoch) for epoch in range(1, epochs + 1) for name in clients)

    return trace(suspect, secret, [known], copies, level=level)


def _note(compared: Sequence[Compared], threshold: float, *, named: bool) -> str:
    """A note on what could not be compared."""
    best = max(compared, key=lambda c: c.weights)
    if best.blind:
        return f"read without the base model, which finds less: {best.weights} of {best.carrying} weights were there"
    if not best.missing:  # whole tensors only: single weights that are zero or not finite don't matter
        return ""
    missing = list(best.missing.items())
    listed = "; ".join(f"{name}: {why}" for name, why in missing[:_SHOWN]) + ("; …" if len(missing) > _SHOWN else "")
    reach = math.sqrt(best.weights)  # roughly the highest score possible: the norm of a mark over these weights
    share = f"{best.weights} of {best.carrying} weights could be compared with {best.model} ({listed})"
    if reach <= threshold and not named:
        return f"too few to name anyone (it is another model, or hardly anything of it is left): {share}"
    return share
