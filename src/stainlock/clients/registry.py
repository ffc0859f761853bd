"""Registry: the entry point to everything about clients, with the verbs of `stainlock clients`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stainlock.clients import issued, records
from stainlock.clients.bases import Source, bases_to_compare, checked_base, load_base, registered_base, source_of
from stainlock.clients.copies import Copy, Protection, make_copy
from stainlock.clients.issuing import issue_orders, layout_of
from stainlock.clients.ledger import Ledger
from stainlock.clients.locked import Locked
from stainlock.clients.orders import orders_for, single_order
from stainlock.clients.records import Model
from stainlock.clients.reporting import write_report
from stainlock.clients.secrets import LAYOUT, checked_name, disclosed_digest
from stainlock.clients.tracing import Trace, trace
from stainlock.errors import FileError
from stainlock.fingerprints import Layout
from stainlock.fingerprints.layout import AMPLITUDE, CHIPS
from stainlock.fingerprints.tracing import LEVEL
from stainlock.numerics import model_digest
from stainlock.target import Target

Progress = Callable[[int, int], None]


class Registry(Ledger):
    """Who has which copy of a model. One SQLite file with names and dates; secrets are derived from one master secret.

    The master secret is a separate file, by default next to the registry and with the suffix ``.secret``. Keep a backup
    elsewhere: without it no leak can be traced, while losing the registry only costs names and dates.

    >>> base = sl.Target(model, input_shape=(3, 32, 32), reference="mine.py:model")
    >>> registry = sl.Registry("clients.db")
    >>> registry.init(base, name="mine").label
    'mine@1'
    >>> registry.add("acme", "globex", "initech")
    3
    >>> registry.issue("acme", out="copies/acme", base=base)["epoch"]
    1
    >>> found = registry.trace("copies/acme", base=base)
    >>> found.verdict, [accused.client for accused in found.clients]
    ('traced', ['acme'])
    """

    def init(
        self,
        model: Target | str,
        *,
        name: str | None = None,
        new_version: bool = False,
        chips: int = CHIPS,
        amplitude: float = AMPLITUDE,
        **options: Any,
    ) -> Model:
        """Register a base model: a target, or a reference with `Target.from_reference`'s options.

        The first call creates the registry, and the master secret unless its file exists. ``new_version`` replaces the
        model of that name: everyone's next copy is made from the new one, with new secrets. ``chips`` and ``amplitude``
        set the fingerprints: higher values survive more, but a larger amplitude also changes the model more.

        >>> registry = sl.Registry("clients.db")
        >>> registry.init(target, name="mine").label
        'mine@1'
        >>> registry.init(stained, name="mine", new_version=True).label
        'mine@2'
        """
        source: Source | None = None
        if isinstance(model, str):
            source = source_of(model, **options)
            base = load_base(source)
        else:
            base = model
        digest = model_digest(base.model)
        label = checked_name(name or _short_name(base.reference or type(base.model).__name__))
        if "@" in label:
            raise ValueError(f"expected a model's name without @, which separates it from its version, got {label}")
        Layout.of(base.model, bytes(32), chips=chips, amplitude=amplitude)  # fail before any file is created
        if not self.path.exists() or self.path.stat().st_size == 0:
            self._begin()
        layout = Layout.of(base.model, self.secret.derive(LAYOUT, digest), chips=chips, amplitude=amplitude)
        public = {"chips": chips, "amplitude": amplitude, "shapes": dict(layout.shapes)}
        with self._open() as connection:
            return records.add_model(
                connection, label, digest, source, public, disclosed_digest(layout.secret), new_version=new_version
            )

    def base(self, given: Target | None = None, *, of: str | None = None) -> tuple[Model, Target]:
        """A registered model and its target, loaded from its source or as given; `FileError` if the weights differ.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> model, base = registry.base(target)
        >>> model.label, base is target
        ('mine@1', True)
        """
        with self._open() as connection:
            model = records.model(connection, of)
        return model, registered_base(model) if given is None else checked_base(given, model)

    def issue(
        self,
        client: str,
        *,
        out: str | Path | None = None,
        delta: str | Path | None = None,
        stain: bool = False,
        lock: str | None = None,
        again: bool = False,
        base: Target | None = None,
        of: str | None = None,
    ) -> dict[str, Any]:
        """Write a client's copy: a bundle to ``out``, only the changes to ``delta``, or both.

        ``stain`` and ``lock`` (a kind of lock) add a stain and a lock of the client's own. The patch and the receipt go
        next to the copy. ``again`` writes a copy that was issued before once more, with the same bytes.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> registry.issue("acme", delta="acme.delta", base=target)["receipt"]
        'acme.delta.receipt.json'
        >>> copy = sl.apply(target, "acme.delta")
        >>> registry.trace(copy, base=target).clients[0].client
        'acme'
        """
        bundle, changes = (Path(place) if place is not None else None for place in (out, delta))
        with self._open() as connection:
            model = records.model(connection, of)
            order = single_order(connection, model, client, bundle, changes, Protection(stain, lock), again=again)
            return issue_orders(connection, self.path, self.secret, model, [order], base)[0]

    def issue_all(
        self,
        out: str | Path,
        *,
        clients: Iterable[str] | None = None,
        deltas: bool = False,
        stain: bool = False,
        lock: str | None = None,
        base: Target | None = None,
        of: str | None = None,
        workers: int = 1,
        ray: str | None = None,
        progress: Progress | None = None,
    ) -> tuple[Sequence[dict[str, Any]], int]:
        """Write copies for everyone, or for these clients, to one folder. Returns those written and how many existed.

        After an interrupted run, the missing copies are written; existing ones stay as they are.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> issued, there = registry.issue_all("copies", deltas=True, base=target)
        >>> len(issued), there
        (2, 0)
        >>> registry.issue_all("copies", deltas=True, base=target)[1]
        2
        """
        with self._open() as connection:
            model = records.model(connection, of)
            orders, there = orders_for(
                connection, model, clients, Path(out), Protection(stain, lock), deltas=deltas
            )  # fmt: skip
            secret = self.secret
            if not orders:
                return [], there
            written = issue_orders(
                connection, self.path, secret, model, orders, base, workers=workers, ray=ray, progress=progress
            )
        return written, there

    def copy(self, client: str, *, epoch: int | None = None, base: Target | None = None, of: str | None = None) -> Copy:
        """Recreate a copy that was issued, with the owner's keys to its stain and lock.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> _ = registry.issue("acme", delta="acme.delta", stain=True, base=target)
        >>> copy = registry.copy("acme", base=target)
        >>> sl.verify(copy.target, copy.stain_key).stained
        True
        """
        model, target = self.base(base, of=of)
        with self._open() as connection:
            owner = records.client(connection, client)
            before = issued.issued_copy(connection, owner, model, epoch or owner.epoch)
        if before is None:
            raise FileError(f"{client} has no copy of {model.label} in epoch {epoch or owner.epoch}")
        secrets = self.secret.for_copy(model.digest, owner.name, before.epoch)
        protection = Protection(before.stain, before.lock)
        return make_copy(target, layout_of(model, target, self.secret), secrets, protection)

    def trace(
        self,
        suspect: Any,
        *,
        level: float = LEVEL,
        base: Target | Sequence[Target] | None = None,
        of: str | None = None,
        blind: bool = False,
        progress: Progress | None = None,
    ) -> Trace:
        """Whose copy is this? ``suspect`` is a path, a target, a module or bare weights.

        It is compared with every registered model, or only with the one named by ``of``. ``base`` passes one or more of
        them, for models that have moved, and compares with these alone. ``blind`` uses no base, which finds less.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> registry.trace(target, base=target).verdict  # the base itself is nobody's copy
        'none'
        """
        with self._open() as connection:
            given = [base] if isinstance(base, Target) else list(base or ())
            models = [records.model(connection, of)] if of is not None else records.models(connection)
            bases = bases_to_compare(models, given, blind=blind)

            def salts(name: str) -> Locked | None:
                found = issued.copies_with(connection, salt=name)
                digests = {model.label: model.digest for model in records.models(connection)}
                return Locked(found[0].client, found[0].epoch, digests[found[0].label]) if found else None

            found = trace(
                suspect, self.secret, bases, lambda: records.epochs(connection), level=level, salts=salts,
                progress=progress,
            )  # fmt: skip
            same = issued.copies_with(connection, digest=found.suspect_digest)
            return dataclasses.replace(found, identical=(same[0].client, same[0].epoch) if same else None)

    def write_report(self, found: Trace, page: str | Path, evidence: str | Path) -> None:
        """Write a page for decision makers and, if clients are named, the evidence file for `check_evidence`.

        The page contains no secrets. The evidence has the secrets of those who are named, and of nobody else.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> _ = registry.add("acme", "globex")
        >>> _ = registry.issue("acme", delta="acme.delta", base=target)
        >>> found = registry.trace(sl.apply(target, "acme.delta"), base=target)
        >>> registry.write_report(found, "trace.html", "trace.json")
        >>> from pathlib import Path
        >>> "the copy that was made for acme" in Path("trace.html").read_text(encoding="utf-8")
        True
        """
        with self._open() as connection:
            write_report(found, self.secret, connection, Path(page), Path(evidence))


def _short_name(reference: str) -> str:
    """A model's name from its reference: the part after the last colon, or the last part of a path."""
    return Path(reference.partition("?")[0].rpartition(":")[2]).name.replace("@", "-")
