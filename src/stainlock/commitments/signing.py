"""Ed25519 keys in PEM files; signatures are made and checked by the library `cryptography`."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stainlock.errors import FileError, StainlockError
from stainlock.storage.durable import refuse_existing, write_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@contextmanager
def commit_extra() -> Iterator[None]:
    """Wraps imports of the libraries that only commitments need."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise StainlockError(f"commitments need {error.name}: pip install stainlock[commit]") from error


@dataclass(frozen=True)
class Signer:
    """The private key that signs commitments: the owner's identity, independent of any model.

    >>> signer = sl.Signer.new()
    >>> sl.commit(stained, key, signer).public_key == signer.public_key
    True
    """

    private: Ed25519PrivateKey = field(repr=False)

    @staticmethod
    def new() -> Signer:
        """A new private key, from the operating system's randomness.

        >>> sl.Signer.new().public_key == sl.Signer.new().public_key
        False
        """
        with commit_extra():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        return Signer(Ed25519PrivateKey.generate())

    @staticmethod
    def load(path: str | Path) -> Signer:
        """Read a private key from a PEM file without a password.

        >>> signer = sl.Signer.new()
        >>> signer.save("signer.pem")
        >>> sl.Signer.load("signer.pem").public_key == signer.public_key
        True
        """
        with commit_extra():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        private = read_private_key(Path(path), "an Ed25519 private key")
        if not isinstance(private, Ed25519PrivateKey):
            raise FileError(f"{path} holds a private key of another kind: expected Ed25519")
        return Signer(private)

    def save(self, path: str | Path) -> None:
        """Write a new PEM file (PKCS 8), readable by its owner alone.

        >>> sl.Signer.new().save("signer.pem")
        """
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        path = Path(path)
        refuse_existing(path)
        content = self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_file(path, content, secret=True)

    @property
    def public_key(self) -> str:
        """The 32 bytes of the public key, in hexadecimal digits.

        >>> len(sl.Signer.new().public_key)
        64
        """
        return self.private.public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        """The Ed25519 signature of a message, in hexadecimal digits.

        >>> len(sl.Signer.new().sign(b"any bytes"))
        128
        """
        return self.private.sign(message).hex()


def is_signed(message: bytes, signature: str, public_key: str) -> bool:
    with commit_extra():
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_public_key(given: str) -> str:
    """64 hexadecimal digits as they are, or those of the public key in a PEM file."""
    if re.fullmatch(r"[0-9a-fA-F]{64}", given):
        return given.lower()
    with commit_extra():
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    content = _read(Path(given), "public key")
    with _refusals_told(f"{given} is not a public key: expected 64 hexadecimal digits or Ed25519 in PEM"):
        key = load_pem_public_key(content)
    if not isinstance(key, Ed25519PublicKey):
        raise FileError(f"{given} holds a public key of another kind: expected Ed25519")
    return key.public_bytes_raw().hex()


def read_private_key(path: Path, kind: str) -> Any:
    """The private key in a PEM file without a password, of any kind; ``kind`` is the expected one, for messages."""
    with commit_extra():
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    content = _read(path, "signing key")
    try:
        with _refusals_told(f"{path} is not a signing key: expected {kind} in PEM"):
            return load_pem_private_key(content, password=None)
    except TypeError as error:
        raise FileError(f"{path} is protected by a password: expected a plain PEM file, mode 0600") from error


@contextmanager
def _refusals_told(message: str) -> Iterator[None]:
    """Turn whatever `cryptography` raises for a PEM file without a key into a `FileError`.

    An InternalError is a refusal by OpenSSL.
    """
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm

    try:
        yield
    except (ValueError, UnsupportedAlgorithm, InternalError) as error:
        raise FileError(message) from error


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(f"can't read {what} {path}: {error.strerror or error}") from error
