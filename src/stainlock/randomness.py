"""Randomness from one explicit seed, never from a global generator.

There are two kinds. A `Stream` is specified to the last bit in docs/key_format.md. Everything that a p-value assumes to
be random comes from one, so anyone who verifies can derive it again from the seed, with any version of any library.
NumPy's and PyTorch's generators are used for everything else. PyTorch's CPU generator uses only 32 bits of its seed,
few enough to try them all, so secrets are never drawn from it.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
import torch
from numpy.typing import NDArray

# Hashed into every stream. Changing it changes the derivation, which would then need a new name in the key.
_DOMAIN = b"stainlock secrets 1"


class Stream:
    """SHAKE-256 over a seed, a purpose and further context, each prefixed with its length."""

    def __init__(self, seed: int, purpose: str, *context: int | bytes) -> None:
        fields = [_DOMAIN, str(seed).encode(), purpose.encode()]
        fields += [str(part).encode() if isinstance(part, int) else part for part in context]
        self._xof = hashlib.shake_256(b"".join(len(field).to_bytes(8, "big") + field for field in fields))
        self._taken = 0

    def take(self, count: int) -> bytes:
        """The stream's next bytes."""
        start, self._taken = self._taken, self._taken + count
        return self._xof.digest(self._taken)[start:]

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next 64-bit words, big-endian."""
        return np.frombuffer(self.take(8 * count), ">u8").astype(np.uint64)

    def uniforms(self, count: int) -> NDArray[np.float64]:
        """Multiples of 2⁻⁵³ in [0, 1): the upper 53 bits of each word."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normals(self, count: int) -> NDArray[np.float64]:
        """Box–Muller: each pair (a, b) of uniforms gives √(−2 ln(1 − a))·cos 2πb, then √(−2 ln(1 − a))·sin 2πb."""
        a, b = self.uniforms(count + count % 2).reshape(-1, 2).T
        radius = np.sqrt(-2 * np.log(1 - a))
        return np.stack([radius * np.cos(2 * np.pi * b), radius * np.sin(2 * np.pi * b)], 1).reshape(-1)[:count]

    def signs(self, count: int) -> NDArray[np.float64]:
        """+1 for each set bit and −1 for each clear one, from the highest bit of each byte to its lowest."""
        bits = np.unpackbits(np.frombuffer(self.take(-(-count // 8)), np.uint8))[:count]
        return np.where(bits == 1, 1.0, -1.0)

    def permutation(self, count: int) -> NDArray[np.int64]:
        """0 … count − 1, sorted by one word per number; among equal words the smaller number comes first."""
        return np.argsort(self.words(count), kind="stable").astype(np.int64)


class Randomness:
    """A seed, and independent generators for named purposes. If no seed is given, a secret one is drawn."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and seed < 0:
            raise ValueError(f"expected a seed of 0 or more, got {seed}")
        self.seed = secrets.randbits(128) if seed is None else int(seed)

    def secret(self, purpose: str) -> np.random.Generator:
        """A generator for secrets that no p-value depends on, which need not be derived again."""
        return np.random.Generator(np.random.PCG64(self._sequence(purpose)))

    def noise(self, purpose: str) -> torch.Generator:
        """A generator for values that are not secret, such as the noise a search starts from."""
        return torch.Generator().manual_seed(int(self._sequence(purpose).generate_state(1, np.uint64)[0] >> 1))

    def _sequence(self, purpose: str) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, *purpose.encode()])
