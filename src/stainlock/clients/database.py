"""The registry's file: SQLite in WAL mode, with a schema version and migrations from every older one."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stainlock.errors import FileError

APPLICATION = 0x53744C43  # "StLC": distinguishes a registry from any other SQLite file
_PATIENCE = 5.0  # seconds to wait for another program's transaction

# Entry i migrates from version i to i + 1. Append new ones; never change one that was released.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE log (number INTEGER PRIMARY KEY, entry TEXT NOT NULL, chain TEXT NOT NULL) STRICT;
    CREATE TABLE models (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        version INTEGER NOT NULL,
        digest TEXT NOT NULL UNIQUE,
        source TEXT,
        layout TEXT NOT NULL,
        added TEXT NOT NULL,
        UNIQUE (name, version)
    ) STRICT;
    CREATE TABLE clients (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        epoch INTEGER NOT NULL DEFAULT 1,
        added TEXT NOT NULL,
        revoked TEXT
    ) STRICT;
    CREATE INDEX clients_with_epochs ON clients (epoch) WHERE epoch > 1;
    CREATE TABLE copies (
        id INTEGER PRIMARY KEY,
        client INTEGER NOT NULL REFERENCES clients (id),
        model INTEGER NOT NULL REFERENCES models (id),
        epoch INTEGER NOT NULL,
        digest TEXT NOT NULL,
        stain INTEGER NOT NULL,
        lock TEXT,
        salt TEXT,
        issued TEXT NOT NULL,
        entry INTEGER NOT NULL REFERENCES log (number),
        UNIQUE (client, model, epoch)
    ) STRICT;
    CREATE INDEX copies_by_salt ON copies (salt) WHERE salt IS NOT NULL;
    CREATE INDEX copies_by_digest ON copies (digest);
    CREATE TRIGGER log_keeps_entries BEFORE DELETE ON log BEGIN SELECT RAISE (ABORT, 'the log only grows'); END;
    CREATE TRIGGER log_keeps_words BEFORE UPDATE ON log BEGIN SELECT RAISE (ABORT, 'the log only grows'); END;
    """,
)


def connect(path: Path, *, create: bool = False) -> sqlite3.Connection:
    """Open a registry and migrate it to this program's version. Later versions and other files are refused."""
    if path.is_dir():
        raise FileError(f"{path} is a folder: expected a registry of clients, which is one file")
    if not create and not path.is_file():
        raise FileError(f"{path} does not exist: `stainlock clients init MODEL --registry {path}` creates it")
    with explained(path):
        if create and not path.exists():  # clients' names are confidential; the WAL gets the same mode
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        connection = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            _check(connection, path)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # a copy reported as issued must be on disk
            connection.execute("PRAGMA foreign_keys = ON")
            _migrate(connection)
        except BaseException:
            connection.close()
            raise
    return connection


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _check(connection: sqlite3.Connection, path: Path) -> None:
    version, application = _number(connection, "user_version"), _number(connection, "application_id")
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if application != APPLICATION and not (empty and version == 0 and application == 0):
        raise FileError(f"{path} is not a registry of clients: it is a database of something else")
    if version > len(MIGRATIONS):
        raise FileError(
            f"{path} is a registry of version {version}, this program reads up to {len(MIGRATIONS)}: update stainlock"
        )


def _migrate(connection: sqlite3.Connection) -> None:
    """Run all steps in one transaction: after a crash the registry has either the old version or the new one."""
    if _number(connection, "user_version") == len(MIGRATIONS):
        return
    with transaction(connection):
        for version in range(_number(connection, "user_version"), len(MIGRATIONS)):
            for statement in _statements(MIGRATIONS[version]):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute(f"PRAGMA application_id = {APPLICATION}")


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit everything inside, or nothing. Other writers wait meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into a one-line `FileError`."""
    try:
        yield
    except sqlite3.OperationalError as error:
        words = _on_one_line(error)
        if "locked" in words or "busy" in words:
            raise FileError(f"{path} is in use by another program: wait for it, and run this again") from error
        raise FileError(f"can't use the registry {path} ({words})") from error
    except sqlite3.DatabaseError as error:
        raise FileError(f"{path} is not a registry of clients, or is damaged ({_on_one_line(error)})") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FileError(f"{path} is damaged: its content can't be read ({error})") from error
    except OSError as error:
        raise FileError(f"can't write {path} ({error.strerror or error})") from error


def _on_one_line(error: sqlite3.Error) -> str:
    """SQLite's messages quote statements from the file, which may have many lines."""
    return " ".join(str(error).split())
