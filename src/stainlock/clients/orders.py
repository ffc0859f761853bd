"""Orders: which copies to write where, and which of them exist already."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stainlock.clients import issued, records
from stainlock.clients.copies import Protection
from stainlock.clients.records import Client, Model
from stainlock.errors import FileError
from stainlock.locks.lock import KINDS
from stainlock.storage.durable import refuse_existing

STAGING, RECEIPT = ".issuing", "receipt.json"


@dataclass(frozen=True)
class Order:
    """One copy to write: a bundle to ``out``, only the changes to ``delta``, or both. ``digest`` is that of the copy
    if it was issued before."""

    client: str
    epoch: int
    out: Path | None
    delta: Path | None
    protection: Protection
    digest: str | None = None

    @property
    def place(self) -> Path:
        """The path from which the other files get their names."""
        place = self.out or self.delta
        assert place is not None
        return place.absolute()

    @property
    def staging(self) -> Path:
        return self.place.parent / f".{self.place.name}{STAGING}"

    def beside(self, suffix: str) -> Path:
        """The path of the receipt or the patch, next to the copy."""
        place = self.out or self.delta
        assert place is not None
        return place.with_name(f"{place.name}{suffix}")

    @property
    def is_there(self) -> bool:
        return all(path is None or path.exists() for path in (self.out, self.delta))

    def check(self) -> None:
        """Refuse to overwrite files, before any work. The receipt and patch of a copy issued before may exist."""
        for path in (self.out, self.delta):
            if path is not None and (self.digest is None or path.exists()):
                refuse_existing(path)
        if self.digest is None:
            for suffix in (".png", ".safetensors", f".{RECEIPT}"):
                refuse_existing(self.beside(suffix))


def single_order(
    connection: sqlite3.Connection,
    model: Model,
    client: str,
    out: Path | None,
    delta: Path | None,
    protection: Protection,
    *,
    again: bool,
) -> Order:
    """The order for one client's copy, which must not have been issued before unless ``again`` is set."""
    if out is None and delta is None:
        raise ValueError("expected a path for the copy: out, delta or both")
    owner = records.active_client(connection, client)
    before = issued.issued_copy(connection, owner, model, owner.epoch)
    if before is not None and not again:
        raise FileError(f"{owner.name} has a copy of {model.label} in epoch {owner.epoch}, issued {before.issued}:"
                        " --again writes the same bytes, `clients rotate` begins a new epoch")  # fmt: skip
    order = _order(connection, model, owner, out, delta, protection)
    _refuse_other_protection(order, protection)
    return order


def _refuse_other_protection(order: Order, asked: Protection) -> None:
    """An issued copy never changes: a stain or lock that it lacks can't be added to it."""
    if asked != Protection() and asked != order.protection:
        raise FileError(f"{order.client}'s copy of epoch {order.epoch} was issued with {order.protection}, not with"
                        f" {asked}: omit that to write the same bytes, or `clients rotate` first")  # fmt: skip


def orders_for(
    connection: sqlite3.Connection,
    model: Model,
    clients: Iterable[str] | None,
    folder: Path,
    protection: Protection,
    *,
    deltas: bool,
) -> tuple[list[Order], int]:
    """Orders for these clients, or for everyone not revoked, and the number of copies that exist already."""
    if clients is None:
        owners = [owner for owner in records.clients(connection) if owner.revoked is None]
    else:
        owners = [records.active_client(connection, name) for name in dict.fromkeys(clients)]
    if not owners:
        raise FileError("there are no clients to issue copies to: `stainlock clients add` adds them")
    orders, there = [], 0
    for owner in owners:
        place = folder / owner.name
        out, delta = (None, folder / f"{owner.name}.delta") if deltas else (place, None)
        order = _order(connection, model, owner, out, delta, protection)
        if order.digest is not None and order.is_there:
            there += 1
        else:
            _refuse_other_protection(order, protection)
            orders.append(order)
    return orders, there


def _order(
    connection: sqlite3.Connection,
    model: Model,
    owner: Client,
    out: Path | None,
    delta: Path | None,
    protection: Protection,
) -> Order:
    if protection.lock is not None and protection.lock not in KINDS:
        raise ValueError(f"expected a lock of kind {', '.join(KINDS)}, got {protection.lock!r}")
    before = issued.issued_copy(connection, owner, model, owner.epoch)
    if before is not None:  # the same bytes need the same protection
        protection = Protection(before.stain, before.lock)
    return Order(owner.name, owner.epoch, out, delta, protection, before.digest if before is not None else None)
