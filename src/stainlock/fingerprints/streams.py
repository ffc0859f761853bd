"""Secret signs: everything random about a fingerprint is ChaCha20's keystream (RFC 8439, counter and nonce zero).

    code(client)       the first m bits of ChaCha20(client's secret)
    carrier(tensor)    ChaCha20(BLAKE2b-256(name, key = model's secret, person = "stainlock carry"))

A bit that is set is +1, others are −1, from the highest bit of each byte to the lowest. Both secrets are 32 bytes. A
tensor's stream depends only on its name and the model's secret, so parts of a model can be read without the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

SECRET_BYTES = 32
_PERSON = b"stainlock carry"
_NONCE = bytes(16)  # the library's 16 bytes begin with the counter
_SIGNS = (2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) - 1).astype(np.float32)


def check_secret(secret: bytes, whose: str) -> None:
    if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
        found = f"{len(secret)} bytes" if isinstance(secret, bytes) else type(secret).__name__
        raise ValueError(f"expected {SECRET_BYTES} bytes as {whose} secret, got {found}")


def keystream(secret: bytes, count: int) -> bytes:
    """The first ``count`` bytes of a secret's stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    return Cipher(algorithms.ChaCha20(secret, _NONCE), mode=None).encryptor().update(bytes(count))


def tensor_secret(model_secret: bytes, name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=SECRET_BYTES, key=model_secret, person=_PERSON).digest()


def signs(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """±1 per bit: ``(..., bytes)`` to ``(..., 8 · bytes)``."""
    return _SIGNS[packed].reshape(*packed.shape[:-1], 8 * packed.shape[-1])


def packed_codes(client_secrets: Iterable[bytes], chips: int) -> NDArray[np.uint8]:
    """Every client's code, eight chips to a byte: ``(clients, chips / 8)``."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    zeros = bytes(chips // 8)
    streams = [
        Cipher(algorithms.ChaCha20(secret, _NONCE), mode=None).encryptor().update(zeros) for secret in client_secrets
    ]
    return np.frombuffer(b"".join(streams), np.uint8).reshape(len(streams), chips // 8)


def code(client_secret: bytes, chips: int) -> NDArray[np.float32]:
    """A client's code: ``chips`` signs."""
    check_secret(client_secret, "a client's")
    return signs(packed_codes([client_secret], chips)[0])
