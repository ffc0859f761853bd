"""Evidence: the numbers of a trace with the secrets of the accused alone, and how they are computed again from them.

Whoever has this file, the suspect and the base model needs neither the registry nor the master secret. The secrets of
all other clients stay secret; their number is the owner's word, and the p-value grows in proportion to it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stainlock import __version__
from stainlock.clients.log import Receipt, now
from stainlock.clients.secrets import FINGERPRINT, disclosed_digest
from stainlock.clients.suspects import read_suspect
from stainlock.clients.tracing import Base, Trace, read_base
from stainlock.errors import FileError
from stainlock.fingerprints import trace as trace_codes
from stainlock.fingerprints.tracing import log10_p_value
from stainlock.storage.checks import check_number, check_text, check_whole
from stainlock.storage.durable import write_file
from stainlock.storage.files import is_model, read_record
from stainlock.target import Target

FORMAT, VERSION = "stainlock-evidence", 1
_MOST_CHIPS = 2**22
_SAME = 1e-6  # how far scores may be apart, relatively: sums in another order


@dataclass(frozen=True)
class Disclosed:
    """One of the accused, with the secret of the copy, and the receipt of when it was issued, if it was."""

    client: str
    epoch: int
    z: float
    p_value: float
    log10_p_value: float
    secret: str
    receipt: dict[str, Any] | None


@dataclass(frozen=True)
class Evidence:
    """A trace with what it takes to repeat it. It names one base model: that of the copies that were found."""

    suspect: str
    suspect_digest: str
    model: str
    model_digest: str
    chips: int
    amplitude: float
    layout_secret: str
    lock_seed: str | None
    level: float
    tested: int
    threshold: float
    compared: int
    carrying: int
    accused: tuple[Disclosed, ...]
    made: str
    stainlock: str = __version__
    format: str = FORMAT
    version: int = VERSION

    def save(self, path: Path) -> None:
        """Write it for whoever checks: it holds secrets, so it is readable by its owner alone."""
        first = {"format": self.format, "version": self.version}
        write_file(path, (json.dumps(first | asdict(self), indent=2) + "\n").encode(), secret=True)

    @staticmethod
    def load(path: str | Path) -> Evidence:
        fields = Evidence.__dataclass_fields__
        facts = read_record(path, "evidence of a trace", FORMAT, VERSION, tuple(fields))
        try:
            accused = tuple(Disclosed(**one) for one in facts["accused"])
            _check(facts, accused)
        except (TypeError, ValueError, KeyError) as error:
            raise FileError(f"{path} is not complete evidence of a trace: {error}") from error
        return Evidence(**{**facts, "accused": accused})


def _check(facts: dict[str, Any], accused: tuple[Disclosed, ...]) -> None:
    """The types and ranges of everything that a check uses; whether it is true is for the check."""
    for name in ("suspect", "suspect_digest", "model", "model_digest", "made", "stainlock"):
        check_text(facts[name], name)
    for secret in (facts["layout_secret"], *(one.secret for one in accused)):
        if not isinstance(secret, str) or not re.fullmatch("[0-9a-f]{64}", secret):
            raise ValueError("expected secrets of 32 bytes in hexadecimal digits")
    for one in accused:
        check_text(one.client, "client")
        if not isinstance(one.receipt, dict | None):
            raise ValueError("expected an object as receipt")
        check_whole(one.epoch, "epoch", 1)
        check_number(one.z, "z")
    check_whole(facts["chips"], "chips", 1, _MOST_CHIPS)
    check_whole(facts["tested"], "tested", 1)
    for name in ("amplitude", "threshold", "level"):
        check_number(facts[name], name)
    if not accused or not 0 < facts["level"] < 1:
        raise ValueError("expected at least one accused client, and a level between 0 and 1")
    if facts["lock_seed"] is not None and not re.fullmatch("[0-9]{1,80}", str(facts["lock_seed"])):
        raise ValueError("expected digits as lock_seed")


@dataclass(frozen=True)
class Checked:
    """What computing a trace again gave: a line for each thing that was compared, and whether it held."""

    holds: bool
    lines: tuple[str, ...]
    clients: tuple[dict[str, Any], ...]


def evidence_of(
    trace: Trace, base: Base, secrets: dict[str, Any], receipts: dict[tuple[str, int], Receipt]
) -> Evidence:
    """The evidence of a trace that named clients; ``secrets`` has those to disclose."""
    compared = next(c for c in trace.compared if c.digest == base.digest)
    accused = tuple(
        Disclosed(one.client, one.epoch, one.z, one.p_value, one.log10_p_value,
                  secrets[FINGERPRINT][one.client, one.epoch].hex(), _plain(receipts.get((one.client, one.epoch))))
        for one in trace.clients if one.model == base.label
    )  # fmt: skip
    return Evidence(
        trace.suspect, trace.suspect_digest, base.label, base.digest, base.chips, base.amplitude,
        secrets["layout"].hex(), secrets["lock_seed"], trace.level, trace.tested, trace.threshold, compared.weights,
        compared.carrying, accused, now(),
    )  # fmt: skip


def _plain(receipt: Receipt | None) -> dict[str, Any] | None:
    return asdict(receipt) if receipt is not None else None


def check_evidence(evidence: Evidence, suspect: Any, base: Target) -> Checked:
    """Everything in the evidence that follows from the suspect, the base model and the disclosed secrets, anew."""
    if not is_model(base.model, evidence.model_digest):
        raise FileError(f"this is not the base model that the evidence is about: expected one with digest"
                        f" {evidence.model_digest[:12]}…")  # fmt: skip
    found = read_suspect(suspect)
    checks = [(f"the suspect is the file with digest {evidence.suspect_digest[:12]}…",
               found.digest == evidence.suspect_digest)]  # fmt: skip
    if evidence.lock_seed is not None and found.lock is not None:
        found = found.opened(int(evidence.lock_seed))
    compared = Base(evidence.model, evidence.model_digest, evidence.chips, evidence.amplitude, base)
    reading = read_base(found, compared, bytes.fromhex(evidence.layout_secret))
    secrets = [bytes.fromhex(one.secret) for one in evidence.accused]
    again = trace_codes(reading, secrets, evidence.level, clients=evidence.tested)
    scores = {one.client: one.z for one in again.accused}
    clients = []
    for place, one in enumerate(evidence.accused):
        z = scores.get(place, float(again.scores[place]))
        log10 = log10_p_value(z, evidence.tested)
        clients.append({"client": one.client, "epoch": one.epoch, "z": z, "p_value": 10**log10, "log10_p_value": log10})
        same = abs(z - one.z) <= _SAME * abs(one.z) and place in scores
        checks.append((f"{one.client}, epoch {one.epoch}: score {one.z:.2f}, computed again {z:.2f}", same))
        checks += _receipt_checks(one, evidence)
    lines = tuple(f"{'yes' if held else 'NO'}: {what}" for what, held in checks)
    return Checked(all(held for _, held in checks), lines, tuple(clients))


def _receipt_checks(one: Disclosed, evidence: Evidence) -> list[tuple[str, bool]]:
    if one.receipt is None:
        return []
    try:
        receipt = Receipt(**one.receipt)
        entry = receipt.entry
        digest = disclosed_digest(bytes.fromhex(one.secret))
        whose = (entry["client"], entry["epoch"], entry["model_digest"])
        fits = entry["secrets"][FINGERPRINT] == digest and whose == (one.client, one.epoch, evidence.model_digest)
        return [(f"its receipt {receipt.chain[:12]}… of {entry['time']} is whole", receipt.holds),
                ("and names this client, this epoch, this model and the digest of this secret", fits)]  # fmt: skip
    except (TypeError, KeyError, ValueError):
        return [("its receipt is readable", False)]
