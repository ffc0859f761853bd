"""The registry's rows about issued copies."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stainlock.clients import log
from stainlock.clients.database import transaction
from stainlock.clients.records import Client, Model, active_client

_COPIES = (
    "SELECT clients.name AS client, models.name AS model, models.version AS version, copies.epoch AS epoch,"
    " copies.digest AS digest, copies.stain AS stain, copies.lock AS lock, copies.salt AS salt,"
    " copies.issued AS issued, copies.entry AS entry FROM copies JOIN clients ON clients.id = copies.client"
    " JOIN models ON models.id = copies.model"
)


@dataclass(frozen=True)
class IssuedCopy:
    """A copy that was issued. ``entry`` is its number in the log, ``salt`` that of its keyed lock."""

    client: str
    model: str
    version: int
    epoch: int
    digest: str
    stain: bool
    lock: str | None
    salt: str | None
    issued: str
    entry: int

    @property
    def label(self) -> str:
        return f"{self.model}@{self.version}"


def issued_copy(connection: sqlite3.Connection, owner: Client, of: Model, epoch: int) -> IssuedCopy | None:
    where = " WHERE copies.client = ? AND copies.model = ? AND copies.epoch = ?"
    return next(_issued(connection, where, (owner.id, of.id, epoch)), None)


def copies_of(connection: sqlite3.Connection, owner: Client) -> list[IssuedCopy]:
    return list(_issued(connection, " WHERE copies.client = ? ORDER BY copies.entry", (owner.id,)))


def copies_with(connection: sqlite3.Connection, *, digest: str = "", salt: str = "") -> list[IssuedCopy]:
    """Copies with exactly these weights, or with this salt in their lock."""
    column, value = ("salt", salt) if salt else ("digest", digest)
    return list(_issued(connection, f" WHERE copies.{column} = ?", (value,)))


def _issued(connection: sqlite3.Connection, where: str, values: tuple[Any, ...]) -> Iterator[IssuedCopy]:
    for row in connection.execute(_COPIES + where, values):
        yield IssuedCopy(**{**row, "stain": bool(row["stain"])})


def record_copy(
    connection: sqlite3.Connection,
    owner: Client,
    of: Model,
    epoch: int,
    copy: dict[str, Any],
    secrets: dict[str, str],
) -> log.Receipt:
    """Record a copy as issued, in the log too. ``copy`` has digest, stain, lock, salt and the digests of its files."""
    with transaction(connection):
        active_client(connection, owner.name)  # they may have been revoked while the copy was made
        facts = {"client": owner.name, "epoch": epoch, "model": of.name, "model_version": of.version,
                 "model_digest": of.digest, **copy, "secrets": secrets}  # fmt: skip
        receipt = log.append(connection, "issued", facts)
        connection.execute(
            "INSERT INTO copies (client, model, epoch, digest, stain, lock, salt, issued, entry)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (owner.id, of.id, epoch, copy["digest"], int(copy["stain"]), copy["lock"], copy["salt"],
             receipt.entry["time"], receipt.entry["number"]),
        )  # fmt: skip
    return receipt
