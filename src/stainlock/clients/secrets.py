"""The master secret, and what is derived from it (HKDF with SHA-256, RFC 5869).

    PRK    = HMAC(key "stainlock clients 1", master secret)
    secret = HMAC(key PRK, info ‖ 0x01)                        32 bytes
    info   = purpose, model, client, epoch                     UTF-8, each with its length in 8 bytes before it

The model is the digest of its weights, the epoch a decimal number. Nothing derived is ever stored, so that whoever has
the master secret, the base model and a list of names can issue and trace without the registry. docs/key_format.md has
the same with test vectors.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stainlock.errors import FileError, StainlockError
from stainlock.storage.durable import refuse_existing, write_file
from stainlock.storage.records import read_record

FORMAT, VERSION = "stainlock-master-secret", 1
_DOMAIN = b"stainlock clients 1"
_SCRYPT = {"n": 2**17, "r": 8, "p": 1}  # 128 MB and about half a second for each guess
_MOST_SCRYPT = {"n": 2**18, "r": 8, "p": 4}  # what a file may ask of us: 256 MB, some seconds
_FIELDS = ("format", "version", "secret", "kdf")
_LONGEST_NAME = 100
# Purposes: what is derived. `layout` is a model's, `check` the registry's, the others a copy's.
LAYOUT, FINGERPRINT, STAIN, LOCK, CHECK = "layout", "fingerprint", "stain", "lock", "check"

Passphrase = str | Callable[[], str] | None


@dataclass(frozen=True)
class CopySecrets:
    """What one client's copy in one epoch is made with."""

    fingerprint: bytes = field(repr=False)
    stain_seed: int = field(repr=False)
    lock_seed: int = field(repr=False)


@dataclass(frozen=True)
class MasterSecret:
    """32 random bytes. Whoever has them can issue every copy and trace every leak; without them nobody can."""

    value: bytes = field(repr=False)

    @staticmethod
    def new() -> MasterSecret:
        return MasterSecret(secrets.token_bytes(32))

    @property
    def _extracted(self) -> bytes:
        return hmac.digest(_DOMAIN, self.value, "sha256")

    def derive(self, purpose: str, model: str = "", client: str = "", epoch: int = 0) -> bytes:
        info = _fields(purpose, model, client, str(epoch))
        return hmac.digest(self._extracted, info + b"\x01", "sha256")

    def derive_many(self, purpose: str, model: str, copies: Iterable[tuple[str, int]]) -> Iterator[bytes]:
        """The same for many clients and epochs, a million in seconds: what they share is hashed once."""
        begun = hmac.new(self._extracted, _fields(purpose, model), "sha256")
        for client, epoch in copies:
            own = begun.copy()
            own.update(_fields(client, str(epoch)) + b"\x01")
            yield own.digest()

    def for_copy(self, model: str, client: str, epoch: int) -> CopySecrets:
        """Seeds have 128 bits, as those that are drawn have."""
        stain, lock = (
            int.from_bytes(self.derive(purpose, model, client, epoch)[:16], "big") for purpose in (STAIN, LOCK)
        )
        return CopySecrets(self.derive(FINGERPRINT, model, client, epoch), stain, lock)

    @property
    def check(self) -> str:
        """What a registry keeps, to tell a wrong secret: 32 bytes that say nothing of it."""
        return self.derive(CHECK).hex()

    def save(self, path: str | Path, passphrase: Passphrase = None) -> None:
        """Write a new file, mode 0600; with a passphrase it holds the secret encrypted (scrypt, ChaCha20-Poly1305)."""
        refuse_existing(Path(path))
        facts: dict[str, Any] = {"format": FORMAT, "version": VERSION, "secret": self.value.hex(), "kdf": None}
        if passphrase is not None:
            facts["kdf"] = {**_SCRYPT, "salt": secrets.token_hex(16)}
            facts["secret"] = _cipher(facts["kdf"], passphrase).encrypt(bytes(12), self.value, _DOMAIN).hex()
        write_file(Path(path), (json.dumps(facts, indent=2) + "\n").encode(), secret=True)

    @staticmethod
    def load(path: str | Path, passphrase: Passphrase = None) -> MasterSecret:
        """Read the file; ``passphrase``, or a function that asks for it, is used only where the file needs one."""
        path = Path(path)
        facts = read_record(path, "master secret", FORMAT, VERSION, _FIELDS)
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise FileError(f"{path} can be read by others: make it yours alone with chmod 600, as it is the secret"
                            " that every copy comes from")  # fmt: skip
        kdf = _checked_kdf(facts["kdf"], path)
        try:
            value = bytes.fromhex(facts["secret"])
        except (TypeError, ValueError):
            raise FileError(f"{path} is damaged: expected its secret in hexadecimal digits") from None
        if kdf is not None:
            if passphrase is None:
                raise FileError(f"{path} is protected by a passphrase, which was not given")
            value = _decrypted(_cipher(kdf, passphrase), value, path)
        if len(value) != 32:
            raise FileError(f"{path} is damaged: expected a secret of 32 bytes, got {len(value)}")
        return MasterSecret(value)


def disclosed_digest(secret: bytes) -> str:
    """What a receipt says of a secret: enough to recognise it once it is disclosed, and nothing before."""
    return hashlib.sha256(_DOMAIN + b" disclosed" + secret).hexdigest()


def checked_name(name: str) -> str:
    """A client's name: it is also a folder's, and part of the derivation, so one person's typing must be another's."""
    given = unicodedata.normalize("NFC", name)
    sensible = given and given == given.strip() and given.isprintable() and len(given) <= _LONGEST_NAME
    if not sensible or set(given) & set("/\\") or given.startswith((".", "-")):
        raise ValueError(
            f"expected a client's name of 1 to {_LONGEST_NAME} printable characters, without slashes, and not beginning"
            f" with a dot, a dash or a space, got {name[:60]!r}"
        )
    return given


def _fields(*texts: str) -> bytes:
    return b"".join(len(part).to_bytes(8, "big") + part for part in (text.encode() for text in texts))


def _checked_kdf(kdf: Any, path: Path) -> dict[str, Any] | None:
    """A file must not make us compute for hours."""
    if kdf is None:
        return None
    known = isinstance(kdf, dict) and set(kdf) == {*_SCRYPT, "salt"} and isinstance(kdf["salt"], str)
    if not known or any(type(kdf[k]) is not int or not 1 <= kdf[k] <= most for k, most in _MOST_SCRYPT.items()):
        raise FileError(f"{path} is damaged: expected the parameters of scrypt as kdf")
    return dict(kdf)


def _cipher(kdf: dict[str, Any], passphrase: Passphrase) -> Any:
    with clients_extra():
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
    words = passphrase() if callable(passphrase) else passphrase
    if not words:
        raise ValueError("expected a passphrase, got an empty one")
    try:
        scrypt = Scrypt(salt=bytes.fromhex(kdf["salt"]), length=32, n=kdf["n"], r=kdf["r"], p=kdf["p"])
    except ValueError as error:
        raise FileError(f"the master secret's file is damaged: {error}") from error
    return ChaCha20Poly1305(scrypt.derive(unicodedata.normalize("NFC", words).encode()))


def _decrypted(cipher: Any, content: bytes, path: Path) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        # Each salt is used once, so that a fixed nonce never meets the same key twice.
        value: bytes = cipher.decrypt(bytes(12), content, _DOMAIN)
    except InvalidTag:
        raise FileError(f"the passphrase does not open {path}: it is another one, or the file is damaged") from None
    return value


@contextmanager
def clients_extra() -> Iterator[None]:
    """Around imports of what only passphrases need."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise StainlockError(f"passphrases need {error.name}: pip install stainlock[clients]") from error
