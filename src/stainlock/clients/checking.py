"""Checking evidence: its numbers recomputed from the suspect, the base models and the disclosed secrets alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stainlock.clients.evidence import Disclosed, Evidence, KnownBase
from stainlock.clients.log import Receipt
from stainlock.clients.readings import Base, read_base
from stainlock.clients.secrets import FINGERPRINT, disclosed_digest
from stainlock.clients.suspects import Suspect, read_suspect
from stainlock.errors import FileError
from stainlock.fingerprints import trace as trace_codes
from stainlock.fingerprints.tracing import log10_p_value
from stainlock.numerics import is_model
from stainlock.target import Target

_SAME = 1e-6  # largest relative difference of scores: sums may be taken in another order

Line = tuple[str, bool]


@dataclass(frozen=True)
class Checked:
    """The result of recomputing a trace: one line per check, and whether all of them hold."""

    holds: bool
    lines: tuple[str, ...]
    clients: tuple[dict[str, Any], ...]


def check_evidence(evidence: Evidence, suspect: Any, *bases: Target) -> Checked:
    """Recompute everything in the evidence that follows from the suspect, its base models and the disclosed secrets."""
    known = {base.digest: base.with_target(_given(base, bases)) for base in evidence.bases}
    found = read_suspect(suspect)
    checks = [(f"the suspect is the file with digest {evidence.suspect_digest[:12]}…",
               found.digest == evidence.suspect_digest)]  # fmt: skip
    if evidence.lock_seed is not None and found.lock is not None:
        found = found.opened(int(evidence.lock_seed))
    clients = []
    for base in evidence.bases:
        accused = [one for one in evidence.accused if one.model == base.model]
        if accused:
            others = [known[digest] for digest in base.mixed_in]
            lines, scores = _scores_again(evidence, accused, base, known[base.digest], others, found)
            checks += lines
            clients += scores
    told = tuple(f"{'yes' if held else 'NO'}: {what}" for what, held in checks)
    return Checked(all(held for _, held in checks), told, tuple(clients))


def _given(base: KnownBase, given: Sequence[Target]) -> Target | None:
    """The base model among those given; None if the trace was made without it."""
    if base.shapes is not None:
        return None
    for target in given:
        if is_model(target.model, base.digest):
            return target
    raise FileError(
        f"the evidence is about copies of {base.model}, which was not given: expected a base model with digest"
        f" {base.digest[:12]}…, with --base on the command line"
    )


def _scores_again(
    evidence: Evidence, accused: list[Disclosed], base: KnownBase, known: Base, others: Sequence[Base], found: Suspect
) -> tuple[list[Line], list[dict[str, Any]]]:
    """Recompute the scores of the clients whose accused copies were made from one base model."""
    assert base.layout_secret is not None
    reading, _ = read_base(found, known, bytes.fromhex(base.layout_secret), others)
    secrets = [bytes.fromhex(one.secret) for one in accused]
    again = trace_codes(reading, secrets, evidence.level, clients=evidence.tested)
    scores = {one.client: one.z for one in again.accused}
    checks: list[Line] = []
    clients = []
    for place, one in enumerate(accused):
        z = scores.get(place, float(again.scores[place]))
        log10 = log10_p_value(z, evidence.tested)
        clients.append({"client": one.client, "epoch": one.epoch, "model": one.model, "z": z, "p_value": 10**log10,
                        "log10_p_value": log10})  # fmt: skip
        same = abs(z - one.z) <= _SAME * abs(one.z) and place in scores
        which = f" of {one.model}" if len(evidence.bases) > 1 else ""
        checks.append((f"{one.client}, epoch {one.epoch}{which}: score {one.z:.2f}, recomputed {z:.2f}", same))
        checks += _receipt_checks(one, base)
    return checks, clients


def _receipt_checks(one: Disclosed, base: KnownBase) -> list[Line]:
    if one.receipt is None:
        return []
    try:
        receipt = Receipt(**one.receipt)
        entry = receipt.entry
        digest = disclosed_digest(bytes.fromhex(one.secret))
        whose = (entry["client"], entry["epoch"], entry["model_digest"])
        fits = entry["secrets"][FINGERPRINT] == digest and whose == (one.client, one.epoch, base.digest)
        return [(f"its receipt {receipt.chain[:12]}… of {entry['time']} is intact", receipt.holds),
                ("and names this client, this epoch, this model and the digest of this secret", fits)]  # fmt: skip
    except (TypeError, KeyError, ValueError):
        return [("its receipt is readable", False)]
