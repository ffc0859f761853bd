"""Opening a registry's file and master secret, checking that they belong together, and checking the audit log."""

from __future__ import annotations

import hmac
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from stainlock.clients import log
from stainlock.clients.database import connect, explained, transaction
from stainlock.clients.secrets import MasterSecret, Passphrase
from stainlock.commitments.log_head import LogCommitment, commit_log
from stainlock.commitments.signing import Signer
from stainlock.errors import FileError

_CHECK = "secret check"


class Opened:
    """The base class of `Registry`. Neither file is touched before it is needed."""

    def __init__(self, path: str | Path, *, secret: str | Path | None = None, passphrase: Passphrase = None) -> None:
        self.path = Path(path)
        self.secret_path = Path(secret) if secret is not None else self.path.with_suffix(".secret")
        self.passphrase = passphrase
        self._connection: sqlite3.Connection | None = None
        self._secret: MasterSecret | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; it is reopened when needed.

        >>> with sl.Registry("clients.db") as registry:  # closes it at the end
        ...     _ = registry.init(target, name="mine")
        >>> registry.close()
        """
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _open(self, *, create: bool = False) -> Iterator[sqlite3.Connection]:
        if self._connection is None:
            self._connection = connect(self.path, create=create)
            try:
                self._check_begun(create)
            except BaseException:
                self.close()
                raise
        with explained(self.path):
            yield self._connection

    def _check_begun(self, create: bool) -> None:
        assert self._connection is not None
        with explained(self.path):
            begun = self._connection.execute("SELECT count(*) FROM facts").fetchone()[0] > 0
        if not create and not begun:
            raise FileError(f"{self.path} is an empty registry: `stainlock clients init MODEL` initialises it")

    @property
    def secret(self) -> MasterSecret:
        """The master secret. A secret that is not this registry's is refused before anything is written.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> registry.secret == sl.Registry("clients.db").secret
        True
        """
        if self._secret is None:
            self._secret = self.check(self.secret_path)
        return self._secret

    def check(self, backup: str | Path | None = None, *, passphrase: Passphrase = None) -> MasterSecret:
        """The master secret in a file, by default the registry's own; `FileError` if it is not this registry's.

        Use it to test a backup: it needs the backup and the registry, but not the secret file in use.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> import shutil
        >>> _ = shutil.copy("clients.secret", "backup.secret")
        >>> registry.check("backup.secret") == registry.secret
        True
        """
        path = Path(backup) if backup is not None else self.secret_path
        with self._open() as connection:  # first: a missing registry must be reported before a missing secret
            if not path.exists():
                raise FileError(f"{path} does not exist: expected the master secret of {self.path}, or a backup of"
                                " it (--secret FILE on the command line)")  # fmt: skip
            secret = MasterSecret.load(path, passphrase or self.passphrase)
            kept = connection.execute("SELECT value FROM facts WHERE name = ?", (_CHECK,)).fetchone()[0]
        if not hmac.compare_digest(str(kept), secret.check):
            raise FileError(f"{path} holds another master secret, not this registry's: nothing was written; find the"
                            f" one that was created with {self.path}")  # fmt: skip
        return secret

    def _begin(self) -> None:
        """Create a registry. An existing secret file is kept: it may belong to a registry that was lost."""
        if not self.secret_path.exists():
            MasterSecret.new().save(self.secret_path, self.passphrase)
        secret = MasterSecret.load(self.secret_path, self.passphrase)
        with self._open(create=True) as connection, transaction(connection):
            if connection.execute("SELECT count(*) FROM facts").fetchone()[0] == 0:
                log.begin(connection)
                connection.execute("INSERT INTO facts VALUES (?, ?)", (_CHECK, secret.check))
                log.append(connection, "begun", {"secret_check": secret.check})

    def check_log(self, commitment: str | Path | None = None) -> tuple[int, str]:
        """The audit log's length and last link; `FileError` if an entry does not follow from the one before it.

        ``commitment`` is a file made by `commit_log`: the log must still contain what was signed.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> registry.check_log()[0]
        2
        """
        signed = LogCommitment.load(commitment) if commitment is not None else None
        with self._open() as connection:
            for _ in log.entries(connection):
                pass
            if signed is not None and log.link_at(connection, signed.entries) != signed.chain:
                raise FileError(f"{commitment} is for another log: entry {signed.entries} of this one has another link")
            return log.head(connection)

    def commit_log(self, signer: Signer, *, statement: str = "") -> LogCommitment:
        """Sign the audit log as it is now: no entry so far can then be changed unnoticed.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> commitment = registry.commit_log(sl.Signer.new())
        >>> commitment.save("log.json")
        >>> registry.check_log("log.json") == (commitment.entries, commitment.chain)
        True
        """
        with self._open() as connection:
            return commit_log(*log.head(connection), signer, statement=statement)
