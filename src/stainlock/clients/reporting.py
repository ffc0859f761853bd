"""The files written after a trace: a page for decision makers, and evidence for those who check it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from stainlock.clients import issued, log, records
from stainlock.clients.evidence import Accused, Disclosed, Evidence, KnownBase
from stainlock.clients.page import trace_page
from stainlock.clients.records import Model
from stainlock.clients.secrets import FINGERPRINT, LAYOUT, MasterSecret
from stainlock.clients.tracing import Compared, Trace
from stainlock.errors import StainlockError
from stainlock.storage.durable import write_file

Receipts = dict[Accused, log.Receipt]


def write_report(
    found: Trace, secret: MasterSecret, connection: sqlite3.Connection, page: Path, evidence: Path
) -> None:
    """Write the page, without secrets, and if clients are named the evidence, with their secrets alone."""
    models = {model.label: model for model in records.models(connection)}
    receipts: Receipts = {}
    for one in found.clients:
        copy = issued.issued_copy(connection, records.client(connection, one.client), models[one.model], one.epoch)
        if copy is not None:
            receipts[one] = log.receipt(connection, copy.entry)
    disclosed = evidence_of(found, secret, models, receipts) if found.clients else None
    try:
        content = trace_page(found, receipts, disclosed, evidence if disclosed is not None else None)
    except ModuleNotFoundError as error:
        raise StainlockError(f"the report's plot needs {error.name}: pip install stainlock[plot]") from error
    write_file(page, content.encode())
    if disclosed is not None:
        disclosed.save(evidence)


def evidence_of(found: Trace, secret: MasterSecret, models: Mapping[str, Model], receipts: Receipts) -> Evidence:
    """The evidence of a trace that named clients: their secrets, and the bases needed to recompute the scores."""
    naming = {one.model for one in found.clients}
    mixed_in = {digest for one in found.compared if one.model in naming for digest in one.mixed_in}
    bases = tuple(
        _base(one, models[one.model], secret, names=one.model in naming)
        for one in found.compared
        if one.model in naming or one.digest in mixed_in
    )
    accused = tuple(
        Disclosed(
            **asdict(one),
            secret=secret.derive(FINGERPRINT, models[one.model].digest, one.client, one.epoch).hex(),
            receipt=asdict(receipts[one]) if one in receipts else None,
        )
        for one in found.clients
    )
    return Evidence(found.suspect, found.suspect_digest, bases, _lock_seed(found, secret, models), found.level,
                    found.tested, found.threshold, accused, log.now())  # fmt: skip


def _base(compared: Compared, model: Model, secret: MasterSecret, *, names: bool) -> KnownBase:
    shapes = {name: tuple(shape) for name, shape in model.layout["shapes"].items()} if compared.blind else None
    return KnownBase(
        model.label, model.digest, model.layout["chips"], model.layout["amplitude"],
        secret.derive(LAYOUT, model.digest).hex() if names else None, compared.weights, compared.carrying,
        compared.mixed_in if names else (), shapes,
    )  # fmt: skip


def _lock_seed(found: Trace, secret: MasterSecret, models: Mapping[str, Model]) -> str | None:
    """The seed of the lock that was undone. It opens that copy, so it is disclosed only if that copy is accused."""
    copies = {(one.client, one.epoch, models[one.model].digest) for one in found.clients}
    lock = found.lock
    if lock is None or (lock.client, lock.epoch, lock.model) not in copies:
        return None
    return str(lock.seed(secret))
