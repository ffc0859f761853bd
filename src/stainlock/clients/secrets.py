"""The master secret, and the secrets derived from it (HKDF with SHA-256, RFC 5869).

    PRK    = HMAC(key "stainlock clients 1", master secret)
    secret = HMAC(key PRK, info ‖ 0x01)                        32 bytes
    info   = purpose, model, client, epoch                     UTF-8, each with its length in 8 bytes before it

The model is the digest of its weights, the epoch a decimal number. Derived secrets are not stored in the registry. The
master secret, the base model and a list of names are therefore enough to issue and trace without it.
docs/key_format.md specifies the same, with test vectors.
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
_SCRYPT = {"n": 2**17, "r": 8, "p": 1}  # 128 MB and about half a second per guess
_MOST_SCRYPT = {"n": 2**18, "r": 8, "p": 4}  # upper limits for a file's parameters: 256 MB, a few seconds
_FIELDS = ("format", "version", "secret", "kdf")
_LONGEST_NAME = 100
# Purposes of derived secrets: `layout` is per model, `check` per registry, the others per copy.
LAYOUT, FINGERPRINT, STAIN, LOCK, CHECK = "layout", "fingerprint", "stain", "lock", "check"

Passphrase = str | Callable[[], str] | None


@dataclass(frozen=True)
class CopySecrets:
    """The secrets of one client's copy in one epoch."""

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
        """The same for many clients and epochs, a million in seconds: the common prefix is hashed once."""
        begun = hmac.new(self._extracted, _fields(purpose, model), "sha256")
        for client, epoch in copies:
            own = begun.copy()
            own.update(_fields(client, str(epoch)) + b"\x01")
            yield own.digest()

    def for_copy(self, model: str, client: str, epoch: int) -> CopySecrets:
        """A copy's secrets. Seeds have 128 bits, like those drawn at random elsewhere."""
        stain, lock = (
            int.from_bytes(self.derive(purpose, model, client, epoch)[:16], "big") for purpose in (STAIN, LOCK)
        )
        return CopySecrets(self.derive(FINGERPRINT, model, client, epoch), stain, lock)

    @property
    def check(self) -> str:
        """Stored in a registry to detect a wrong secret: 32 bytes, in hexadecimal, that reveal nothing about it."""
        return self.derive(CHECK).hex()

    def save(self, path: str | Path, passphrase: Passphrase = None) -> None:
        """Write a new file, mode 0600. With a passphrase the secret is encrypted (scrypt, ChaCha20-Poly1305)."""
        refuse_existing(Path(path))
        facts: dict[str, Any] = {"format": FORMAT, "version": VERSION, "secret": self.value.hex(), "kdf": None}
        if passphrase is not None:
            facts["kdf"] = {**_SCRYPT, "salt": secrets.token_hex(16)}
            facts["secret"] = _cipher(facts["kdf"], passphrase).encrypt(bytes(12), self.value, _DOMAIN).hex()
        write_file(Path(path), (json.dumps(facts, indent=2) + "\n").encode(), secret=True)

    @staticmethod
    def load(path: str | Path, passphrase: Passphrase = None) -> MasterSecret:
        """Read the file; ``passphrase``, or a function that asks for it, is used only if the file needs one."""
        path = Path(path)
        facts = read_record(path, "master secret", FORMAT, VERSION, _FIELDS)
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise FileError(f"{path} can be read by others: restrict it with chmod 600, as every copy's secrets are"
                            " derived from it")  # fmt: skip
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
    """The digest of a secret in a receipt: identifies the secret once disclosed, and reveals nothing before."""
    return hashlib.sha256(_DOMAIN + b" disclosed" + secret).hexdigest()


def checked_name(name: str) -> str:
    """A client's name in NFC. It names a folder and enters the derivation, so equal names must have equal bytes."""
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
    """The parameters of scrypt, limited so that a file can't make us compute for hours."""
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
        # Each file has a new salt and so a new key: a fixed nonce is never used twice with the same key.
        value: bytes = cipher.decrypt(bytes(12), content, _DOMAIN)
    except InvalidTag:
        raise FileError(f"the passphrase does not open {path}: it is wrong, or the file is damaged") from None
    return value


@contextmanager
def clients_extra() -> Iterator[None]:
    """Wraps imports that only passphrases need."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise StainlockError(f"passphrases need {error.name}: pip install stainlock[clients]") from error
