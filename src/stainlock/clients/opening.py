"""A registry's file and its master secret: opened together, checked against each other; and the log that grows."""

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
    """What `Registry` is built on. Neither file is touched before it is needed."""

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
        """Close the file; it is opened again when it is needed.

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
            raise FileError(f"{self.path} is an empty registry: `stainlock clients init MODEL` begins one")

    @property
    def secret(self) -> MasterSecret:
        """The master secret, which must be this registry's: a wrong one is told before anything is written.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> registry.secret == sl.Registry("clients.db").secret
        True
        """
        if self._secret is None:
            self._secret = self.check(self.secret_path)
        return self._secret

    def check(self, backup: str | Path | None = None, *, passphrase: Passphrase = None) -> MasterSecret:
        """The master secret in a file, by default the registry's own, if it fits this registry; else an error.

        This is how a backup is tested: it needs the backup and the registry, and not the file that is in use.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> import shutil
        >>> _ = shutil.copy("clients.secret", "backup.secret")
        >>> registry.check("backup.secret") == registry.secret
        True
        """
        path = Path(backup) if backup is not None else self.secret_path
        with self._open() as connection:  # first of all: without a registry there is nothing that a secret could fit
            if not path.exists():
                raise FileError(f"{path} is not there: expected the master secret of {self.path}, or a backup of"
                                " it (--secret FILE in the command line)")  # fmt: skip
            secret = MasterSecret.load(path, passphrase or self.passphrase)
            kept = connection.execute("SELECT value FROM facts WHERE name = ?", (_CHECK,)).fetchone()[0]
        if not hmac.compare_digest(str(kept), secret.check):
            raise FileError(f"{path} holds another master secret than this registry's: nothing was written; find the"
                            f" one that was made with {self.path}")  # fmt: skip
        return secret

    def _begin(self) -> None:
        """A new registry. A secret that is there already is kept: it may be that of a registry that was lost."""
        if not self.secret_path.exists():
            MasterSecret.new().save(self.secret_path, self.passphrase)
        secret = MasterSecret.load(self.secret_path, self.passphrase)
        with self._open(create=True) as connection, transaction(connection):
            if connection.execute("SELECT count(*) FROM facts").fetchone()[0] == 0:
                log.begin(connection)
                connection.execute("INSERT INTO facts VALUES (?, ?)", (_CHECK, secret.check))
                log.append(connection, "begun", {"secret_check": secret.check})

    def check_log(self, commitment: str | Path | None = None) -> tuple[int, str]:
        """How many entries the audit log has, and its last link, if every entry follows from the one before it.

        ``commitment`` is a signed one, made by `commit_log`: the log must still contain what was signed.

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
        """Sign the audit log as it is now: no entry up to here can be changed unnoticed.

        >>> registry = sl.Registry("clients.db")
        >>> _ = registry.init(target, name="mine")
        >>> commitment = registry.commit_log(sl.Signer.new())
        >>> commitment.save("log.json")
        >>> registry.check_log("log.json") == (commitment.entries, commitment.chain)
        True
        """
        with self._open() as connection:
            return commit_log(*log.head(connection), signer, statement=statement)
