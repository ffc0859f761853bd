"""Ledger: the part of a registry that deals with names, dates and the log. It loads neither torch nor models."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stainlock.clients import issued, records
from stainlock.clients.issued import IssuedCopy
from stainlock.clients.opening import Opened
from stainlock.clients.records import Client, Model
from stainlock.storage.durable import refuse_existing


class Ledger(Opened):
    """Clients and the copies they were issued. `Registry` adds the operations that need a model."""

    def add(self, *names: str) -> int:
        """Add clients, all or none of them.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> registry.add("acme", "globex")
        2
        """
        with self._open() as connection:
            return records.add_clients(connection, names)

    def models(self) -> Sequence[Model]:
        """The registered base models, every version of each.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> [model.label for model in registry.models()]
        ['mine@1']
        """
        with self._open() as connection:
            return records.models(connection)

    def show(self, name: str) -> tuple[Client, Sequence[IssuedCopy]]:
        """A client, and every copy issued to them.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> client, copies = registry.show("acme")
        >>> client.epoch, copies
        (1, [])
        """
        with self._open() as connection:
            found = records.client(connection, name)
            return found, issued.copies_of(connection, found)

    def count(self) -> tuple[int, int]:
        """How many clients there are, and how many copies were issued.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> registry.count()
        (2, 0)
        """
        with self._open() as connection:
            return records.count(connection)

    def rotate(self, *names: str) -> Sequence[Client]:
        """Begin a new epoch for these clients: their next copy and patch are new. Old copies are still traced to them.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> registry.rotate("acme")[0].epoch
        2
        """
        with self._open() as connection:
            return records.rotate(connection, names)

    def revoke(self, *names: str) -> Sequence[Client]:
        """Issue no more copies to these clients. Those they have are still traced to them.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> _ = registry.revoke("acme")
        >>> registry.issue("acme", delta="acme.delta", base=target)
        Traceback (most recent call last):
        stainlock.errors.FileError: acme was revoked ...
        """
        with self._open() as connection:
            return records.revoke(connection, names)

    def export(self, path: str | Path) -> int:
        """Write clients and copies to a CSV file without secrets. Returns the number of lines below the header.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> registry.export("clients.csv")
        2
        """
        refuse_existing(Path(path))
        names = [field.name for field in dataclasses.fields(IssuedCopy)]
        with self._open() as connection, Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, [*names, "added", "revoked"])
            writer.writeheader()
            lines = 0
            for owner in records.clients(connection):
                copies: Sequence[dict[str, Any]] = [
                    dataclasses.asdict(copy) for copy in issued.copies_of(connection, owner)
                ] or [{"client": owner.name}]
                for copy in copies:
                    writer.writerow({**copy, "added": owner.added, "revoked": owner.revoked})
                    lines += 1
        return lines

    def list(self, *, limit: int | None = None, after: str = "") -> Iterator[Client]:
        """Clients sorted by name, starting after the name ``after``.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> [client.name for client in registry.list()]
        ['acme', 'globex']
        """
        with self._open() as connection:
            yield from records.clients(connection, limit=limit, after=after)
