"""The registry's rows about models and clients."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stainlock.clients import log
from stainlock.clients.database import transaction
from stainlock.clients.secrets import checked_name
from stainlock.errors import FileError
from stainlock.storage.records import parse_json
from stainlock.storage.values import shown

_MOST_EPOCHS = 100_000  # per client: one a day would last for centuries


@dataclass(frozen=True)
class Model:
    """A registered base model. ``source`` says where it can be loaded from, if known. ``layout`` is the public part of
    its fingerprints: the number of chips, the amplitude, and the shapes of the tensors that carry them."""

    id: int
    name: str
    version: int
    digest: str
    source: dict[str, Any] | None
    layout: dict[str, Any]
    added: str

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True)
class Client:
    """``epoch`` counts from 1; each `rotate` begins the next. A revoked client gets no more copies."""

    id: int
    name: str
    epoch: int
    added: str
    revoked: str | None


def add_model(
    connection: sqlite3.Connection,
    name: str,
    digest: str,
    source: dict[str, Any] | None,
    layout: dict[str, Any],
    layout_digest: str,
    *,
    new_version: bool,
) -> Model:
    with transaction(connection):
        same = connection.execute("SELECT name, version FROM models WHERE digest = ?", (digest,)).fetchone()
        if same is not None:
            raise FileError(f"this model is in the registry already, as {same['name']}@{same['version']}")
        known = connection.execute("SELECT max(version) FROM models WHERE name = ?", (name,)).fetchone()[0]
        if known is not None and not new_version:
            raise FileError(f"the registry has another model called {name}: give this one a --name of its own, or add"
                            " it as a --new-version, which everyone's next copies are made from")  # fmt: skip
        if known is None and new_version:
            raise FileError(f"the registry has no model called {name} to be a new version of: it has"
                            f" {_named(connection)}; give its --name")  # fmt: skip
        facts = {"model": name, "model_version": (known or 0) + 1, "model_digest": digest, "layout": layout_digest}
        log.append(connection, "model", facts)
        connection.execute(
            "INSERT INTO models (name, version, digest, source, layout, added) VALUES (?, ?, ?, ?, ?, ?)",
            (name, (known or 0) + 1, digest, json.dumps(source) if source else None, json.dumps(layout), log.now()),
        )
    return model(connection, f"{name}@{(known or 0) + 1}")


def models(connection: sqlite3.Connection) -> list[Model]:
    rows = connection.execute("SELECT * FROM models ORDER BY name, version")
    return [_model(row) for row in rows]


def _model(row: sqlite3.Row) -> Model:
    try:
        source, layout = parse_json(row["source"] or "null"), parse_json(row["layout"])
        if not isinstance(layout, dict) or not isinstance(source, dict | None):
            raise ValueError("expected objects")
    except ValueError as error:
        raise FileError(f"the registry is damaged: model {shown(row['name'])} is not fully described") from error
    return Model(**{**row, "source": source, "layout": layout})


def model(connection: sqlite3.Connection, wanted: str | None) -> Model:
    """``NAME@VERSION``, ``NAME`` for its latest version, None if there is only one name."""
    known = models(connection)
    if wanted is None:
        if len({m.name for m in known}) != 1:
            raise ValueError(f"expected --of NAME, as the registry has several models: {_named(connection)}")
        return known[-1]
    found = [m for m in known if wanted in (m.name, m.label)]
    if not found:
        raise FileError(f"the registry has no model {wanted}: it has {_named(connection)}")
    return found[-1]


def _named(connection: sqlite3.Connection) -> str:
    return ", ".join(sorted({m.name for m in models(connection)})) or "none"


def add_clients(connection: sqlite3.Connection, names: Iterable[str]) -> int:
    """Add all of them or none, in one transaction. The log gets one entry, with the digest of the names."""
    wanted = [checked_name(name) for name in names]
    if not wanted:
        raise ValueError("expected at least one client to add, got none")
    added = log.now()
    with transaction(connection):
        before = connection.total_changes
        last = connection.execute("SELECT coalesce(max(id), 0) FROM clients").fetchone()[0]
        connection.executemany(
            "INSERT INTO clients (name, added) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
            ((name, added) for name in wanted),
        )
        if connection.total_changes - before != len(wanted):
            raise FileError(_given_twice(connection, wanted, last))
        digest = hashlib.sha256("\n".join(sorted(wanted)).encode()).hexdigest()
        few = {"clients": wanted} if len(wanted) <= 100 else {}
        log.append(connection, "added", {"count": len(wanted), "names_digest": digest, **few})
    return len(wanted)


def _given_twice(connection: sqlite3.Connection, wanted: list[str], last: int) -> str:
    seen: set[str] = set()
    for name in wanted:
        if name in seen:
            return f"{name} is given twice: no client was added"
        seen.add(name)
        before = connection.execute("SELECT added FROM clients WHERE name = ? AND id <= ?", (name, last)).fetchone()
        if before is not None:
            return f"{name} is in the registry already, since {before[0]}: no client was added"
    return "one of these clients is in the registry already: no client was added"


def client(connection: sqlite3.Connection, name: str) -> Client:
    row = connection.execute("SELECT * FROM clients WHERE name = ?", (checked_name(name),)).fetchone()
    if row is None:
        raise FileError(
            f"there is no client {name} in the registry: `stainlock clients add` adds one, `list` lists them"
        )
    return Client(**row)


def active_client(connection: sqlite3.Connection, name: str) -> Client:
    """A client who is not revoked; else `FileError`."""
    found = client(connection, name)
    if found.revoked is not None:
        raise FileError(f"{name} was revoked on {found.revoked} and gets no more copies")
    return found


def clients(connection: sqlite3.Connection, *, limit: int | None = None, after: str = "") -> Iterator[Client]:
    """Clients sorted by name."""
    rows = connection.execute(
        "SELECT * FROM clients WHERE name > ? ORDER BY name LIMIT ?", (after, -1 if limit is None else limit)
    )
    return (Client(**row) for row in rows)


def count(connection: sqlite3.Connection) -> tuple[int, int]:
    """The number of clients, and of copies issued."""
    row = connection.execute("SELECT (SELECT count(*) FROM clients), (SELECT count(*) FROM copies)").fetchone()
    return int(row[0]), int(row[1])


def epochs(connection: sqlite3.Connection) -> Iterator[tuple[str, int]]:
    """Every client with every epoch they ever had. Tracing tests all of these."""
    for name, epoch in connection.execute("SELECT name, epoch FROM clients ORDER BY id"):
        if not 1 <= epoch <= _MOST_EPOCHS:  # a damaged count must not start an endless loop
            raise FileError(f"the registry is damaged: {shown(name)} has {epoch} epochs, expected 1 to {_MOST_EPOCHS}")
        for number in range(1, epoch + 1):
            yield name, number


def rotate(connection: sqlite3.Connection, names: Sequence[str]) -> list[Client]:
    """Begin the next epoch: copies issued from now on differ from the earlier ones."""
    with transaction(connection):
        for name in names:
            found = active_client(connection, name)
            connection.execute("UPDATE clients SET epoch = epoch + 1 WHERE id = ?", (found.id,))
            log.append(connection, "rotated", {"client": found.name, "epoch": found.epoch + 1})
    return [client(connection, name) for name in names]


def revoke(connection: sqlite3.Connection, names: Sequence[str]) -> list[Client]:
    with transaction(connection):
        for name in names:
            found = active_client(connection, name)
            connection.execute("UPDATE clients SET revoked = ? WHERE id = ?", (log.now(), found.id))
            log.append(connection, "revoked", {"client": found.name, "epoch": found.epoch})
    return [client(connection, name) for name in names]
