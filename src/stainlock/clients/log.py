"""The audit log: what was done to the registry, each entry chained to the previous one.

    chain_0 = 32 random bytes
    chain_n = SHA-256(chain_(n−1) ‖ entry_n)              the entry as JSON: names sorted, no spaces, ASCII

A signed and dated chain_n shows whether any entry up to n was changed since. Because of the random start, chain_n
reveals nothing: nobody can test guessed names against it. A receipt is one entry with the links before and after it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stainlock import __version__
from stainlock.commitments.evidence import TIME
from stainlock.errors import FileError
from stainlock.storage.records import canonical, parse_json, read_record

FORMAT, VERSION = "stainlock-receipt", 1
_START = "log start"


@dataclass(frozen=True)
class Receipt:
    """One entry of the log, and the links before and after it."""

    entry: dict[str, Any]
    previous: str
    chain: str

    @property
    def holds(self) -> bool:
        return _link(self.previous, canonical(self.entry).decode()) == self.chain

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2, sort_keys=True) + "\n"

    @staticmethod
    def load(path: str | Path) -> Receipt:
        """Read a receipt; `FileError` if it was altered."""
        facts = read_record(path, "receipt", FORMAT, VERSION, ("format", "version", "entry", "previous", "chain"))
        receipt = Receipt(facts["entry"], facts["previous"], facts["chain"])
        try:
            holds = isinstance(receipt.entry, dict) and receipt.holds
        except (TypeError, ValueError):
            holds = False
        if not holds:
            raise FileError(f"{path} was altered after it was written: its entry does not hash to its chain")
        return receipt


def now() -> str:
    return datetime.now(UTC).strftime(TIME)


def begin(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO facts VALUES (?, ?)", (_START, secrets.token_hex(32)))


def append(connection: sqlite3.Connection, event: str, facts: Mapping[str, Any]) -> Receipt:
    """Add an entry, within the caller's transaction."""
    number, previous = head(connection)
    entry = {"number": number + 1, "time": now(), "event": event, "stainlock": __version__, **facts}
    text = canonical(entry).decode()
    chain = _link(previous, text)
    connection.execute("INSERT INTO log VALUES (?, ?, ?)", (number + 1, text, chain))
    return Receipt(entry, previous, chain)


def head(connection: sqlite3.Connection) -> tuple[int, str]:
    """The number of entries, and the last link."""
    last = connection.execute("SELECT number, chain FROM log ORDER BY number DESC LIMIT 1").fetchone()
    return (int(last[0]), str(last[1])) if last is not None else (0, _start(connection))


def receipt(connection: sqlite3.Connection, number: int) -> Receipt:
    """The receipt of an entry, the same as when the entry was made."""
    text, chain = connection.execute("SELECT entry, chain FROM log WHERE number = ?", (number,)).fetchone()
    return Receipt(parse_json(text), link_at(connection, number - 1), str(chain))


def link_at(connection: sqlite3.Connection, number: int) -> str:
    if number == 0:
        return _start(connection)
    found = connection.execute("SELECT chain FROM log WHERE number = ?", (number,)).fetchone()
    if found is None:
        raise FileError(f"the registry's log has no entry {number}: it belongs to another registry, or was truncated")
    return str(found[0])


def entries(connection: sqlite3.Connection) -> Iterator[Receipt]:
    """The whole log, link by link; `FileError` if an entry does not follow from the one before it."""
    previous = _start(connection)
    for expected, (number, text, chain) in enumerate(connection.execute("SELECT * FROM log ORDER BY number"), 1):
        if number != expected or not isinstance(text, str) or _link(previous, text) != chain:
            raise FileError(f"the registry's log was altered: entry {expected} does not follow from the one before it")
        try:
            entry = parse_json(text)
        except ValueError as error:
            raise FileError(f"the registry's log was altered: entry {number} is not JSON") from error
        yield Receipt(entry, previous, chain)
        previous = chain


def _start(connection: sqlite3.Connection) -> str:
    found = connection.execute("SELECT value FROM facts WHERE name = ?", (_START,)).fetchone()
    if found is None or not re.fullmatch("[0-9a-f]{64}", str(found[0])):
        raise FileError("the registry's log was altered: its random start is missing or malformed")
    return str(found[0])


def _link(previous: str, text: str) -> str:
    return hashlib.sha256(bytes.fromhex(previous) + text.encode()).hexdigest()
