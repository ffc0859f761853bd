"""Issuing: write copies to disk and record them in the registry, one or thousands, each completely or not at all.

    1   a worker makes the copy and writes it, whole and synced, to a folder beside its place:  .NAME.issuing
    2   this process records it in the registry, with its receipt, in one transaction
    3   and renames it into place, the bundle or delta last

If the process is killed before 2, nothing was issued, and the next run removes the folder. If it is killed between 2
and 3, the copy counts as issued, and the next run writes the same bytes again. Workers receive the secrets of single
copies, never the master secret.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stainlock.clients import issued, log, records
from stainlock.clients.bases import Source, checked_base, load_base, registered_base
from stainlock.clients.copies import Copy, make_copy
from stainlock.clients.orders import RECEIPT, STAGING, Order
from stainlock.clients.records import Model
from stainlock.clients.secrets import FINGERPRINT, LAYOUT, CopySecrets, MasterSecret, disclosed_digest
from stainlock.errors import FileError
from stainlock.fingerprints import Layout
from stainlock.models.bundle import write_bundle
from stainlock.numerics import is_model, model_digest
from stainlock.plan import diff
from stainlock.storage.durable import claim, make_folder, sync_folder, write_file, writing
from stainlock.sweeps import Unit, run_sweep
from stainlock.target import Target

_BUNDLE, _DELTA = "bundle", "delta"


@dataclass(frozen=True)
class Issuing:
    """The work of a sweep: one unit per copy. ``base`` is None if workers load the model from ``source`` themselves."""

    orders: Sequence[Order]
    secrets: Sequence[CopySecrets]
    layout: Layout
    model: str
    source: Source | None
    base: Target | None

    def units(self) -> list[Unit]:
        return [Unit(order.client, {"number": number}) for number, order in enumerate(self.orders)]

    def identity(self) -> dict[str, Any]:
        return {"model": self.model}

    def prepare(self) -> Target:
        if self.base is not None:
            return self.base
        assert self.source is not None
        base = load_base(self.source)
        if not is_model(base.model, self.model):
            raise FileError("the worker's base model is not the registered one: their digests differ")
        return base

    def run(self, state: Target, unit: Unit) -> list[dict[str, Any]]:
        """Step 1."""
        order, secrets = self.orders[unit.facts["number"]], self.secrets[unit.facts["number"]]
        copy = make_copy(state, self.layout, secrets, order.protection)
        return [write_copy(order, copy, state)]


def write_copy(order: Order, copy: Copy, base: Target) -> dict[str, Any]:
    """Write a copy's files to its staging folder. Returns what the registry records about it."""
    folder = order.staging
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder.parent)
        folder.mkdir(mode=0o700)
    facts: dict[str, Any] = {
        "stain": order.protection.stain, "lock": order.protection.lock, "salt": copy.salt, "files": {}
    }  # fmt: skip
    if order.out is not None:
        (folder / _BUNDLE).mkdir()
        (folder / _BUNDLE).chmod(0o755)
        facts["digest"] = write_bundle(copy.target, folder / _BUNDLE)
    else:
        facts["digest"] = model_digest(copy.target.model)
    contents: dict[str, bytes] = {}
    if order.delta is not None:
        contents[_DELTA] = diff(base, copy.target).to_bytes()
    if copy.patch is not None:
        suffix, content = copy.patch
        contents[f"patch{suffix}"] = content
    for name, content in contents.items():
        write_file(folder / name, content, secret=True)
        facts["files"][name] = hashlib.sha256(content).hexdigest()
    with writing(folder):
        sync_folder(folder)
    return facts


def publish(order: Order, receipt: log.Receipt) -> dict[str, str]:
    """Step 3: move the files into place. Any left there by an interrupted run have the same bytes."""
    folder, placed = order.staging, {}
    write_file(folder / RECEIPT, receipt.to_json().encode())
    names = [RECEIPT, "patch.png", "patch.safetensors", _DELTA, _BUNDLE]
    for name in (name for name in names if (folder / name).exists()):
        place = order.out if name == _BUNDLE else order.delta if name == _DELTA else None
        if place is None:
            place = order.beside(f".{RECEIPT}" if name == RECEIPT else Path(name).suffix)
        with writing(place):
            os.replace(folder / name, place)
            sync_folder(place.absolute().parent)
        placed[Path(name).stem] = str(place)
    shutil.rmtree(folder, ignore_errors=True)
    return placed


def issue_orders(
    connection: sqlite3.Connection,
    path: Path,
    secret: MasterSecret,
    model: Model,
    orders: Sequence[Order],
    base: Target | None,
    *,
    workers: int = 1,
    ray: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Carry out all orders; each copy is recorded (step 2) and put into place as it arrives. ``path``: the registry."""
    secrets = [secret.for_copy(model.digest, order.client, order.epoch) for order in orders]
    done: dict[str, dict[str, Any]] = {}

    def arrived(unit: Unit, rows: list[dict[str, Any]]) -> None:
        number, (facts,) = unit.facts["number"], rows
        receipt = _record(connection, model, orders[number], secrets[number], facts)
        placed = publish(orders[number], receipt)
        done[unit.name] = {
            "client": orders[number].client, "epoch": orders[number].epoch, "digest": facts["digest"],
            "out": placed.get(_BUNDLE), "delta": placed.get(_DELTA), "patch": placed.get("patch"),
            "receipt": placed["receipt"],
        }  # fmt: skip

    with alone(path):
        for order in orders:
            order.check()
        at_hand = registered_base(model) if base is None else checked_base(base, model)
        layout = layout_of(model, at_hand, secret)
        # A single worker uses the base in memory; several load it themselves, unless the caller passed one.
        loads_anew = base is None and (workers > 1 or ray is not None)
        issuing = Issuing(orders, secrets, layout, model.digest, model.source, None if loads_anew else at_hand)
        try:
            run_sweep(issuing, workers=workers, ray=ray, progress=progress, on_unit=arrived)
        finally:
            for order in orders:
                shutil.rmtree(order.staging, ignore_errors=True)
    return [done[unit.name] for unit in issuing.units()]


def layout_of(model: Model, base: Target, secret: MasterSecret) -> Layout:
    own = secret.derive(LAYOUT, model.digest)
    return Layout.of(base.model, own, chips=model.layout["chips"], amplitude=model.layout["amplitude"])


def _record(
    connection: sqlite3.Connection, model: Model, order: Order, secrets: CopySecrets, facts: dict[str, Any]
) -> log.Receipt:
    owner = records.client(connection, order.client)
    before = issued.issued_copy(connection, owner, model, order.epoch)
    if before is None:
        disclosed = {FINGERPRINT: disclosed_digest(secrets.fingerprint)}
        return issued.record_copy(connection, owner, model, order.epoch, facts, disclosed)
    if before.digest != facts["digest"]:
        raise FileError(f"the copy for {order.client} does not have the same bytes as when it was issued on"
                        f" {before.issued}: write it again on the machine that made it, or rotate")  # fmt: skip
    return log.receipt(connection, before.entry)


@contextmanager
def alone(registry: Path) -> Iterator[None]:
    """Let only one run at a time issue from a registry: two would write the same copies."""
    place = registry.with_name(f".{registry.name}{STAGING}")  # never removed: otherwise two runs could get in
    with writing(place), place.open("ab") as file:
        place.chmod(0o600)
        claim(file, f"{registry} is in use: another run is issuing copies from it; wait for it and run this again")
        yield
