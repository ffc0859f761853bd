"""What is written after a trace: the page for people who decide, and the evidence for those who check."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from stainlock.clients import issued, log, records
from stainlock.clients.evidence import Evidence, evidence_of
from stainlock.clients.page import trace_page
from stainlock.clients.secrets import FINGERPRINT, LAYOUT, MasterSecret
from stainlock.clients.tracing import Base, Trace, lock_seed
from stainlock.errors import StainlockError
from stainlock.storage.durable import write_file


def write_report(
    found: Trace, secret: MasterSecret, connection: sqlite3.Connection, page: Path, evidence: Path
) -> None:
    """The page, which holds no secret; and where clients are named the evidence, with the secrets of these alone."""
    models = {model.label: model for model in records.models(connection)}
    receipts = {}
    for one in found.clients:
        copy = issued.issued_copy(connection, records.client(connection, one.client), models[one.model], one.epoch)
        if copy is not None:
            receipts[one.client, one.epoch] = log.receipt(connection, copy.entry)
    disclosed: Evidence | None = None
    if found.clients:
        first = models[found.clients[0].model]  # the base that the most certain of them had
        base = Base(first.label, first.digest, first.layout["chips"], first.layout["amplitude"], None)
        secrets = {
            LAYOUT: secret.derive(LAYOUT, first.digest),
            FINGERPRINT: {
                (one.client, one.epoch): secret.derive(FINGERPRINT, first.digest, one.client, one.epoch)
                for one in found.clients
                if one.model == first.label
            },
            "lock_seed": str(lock_seed(secret, first.digest, *found.lock_of)) if found.lock_of else None,
        }
        disclosed = evidence_of(found, base, secrets, receipts)
    try:
        content = trace_page(found, receipts, disclosed, evidence if disclosed is not None else None)
    except ModuleNotFoundError as error:
        raise StainlockError(f"the report's plot needs {error.name}: pip install stainlock[plot]") from error
    write_file(page, content.encode())
    if disclosed is not None:
        disclosed.save(evidence)
