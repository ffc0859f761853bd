"""Randomness from one explicit seed, never from a global generator.

PyTorch's CPU generator uses 32 bits of its seed, few enough to try them all, so that secrets are drawn
with NumPy's generators from a seed of 128 bits.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch


class Randomness:
    """A seed, and independent generators for named purposes. Without a seed, a secret one is drawn."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and seed < 0:
            raise ValueError(f"expected a seed of 0 or more, got {seed}")
        self.seed = secrets.randbits(128) if seed is None else int(seed)

    def secret(self, purpose: str) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(self._sequence(purpose)))

    def noise(self, purpose: str) -> torch.Generator:
        """For what is no secret: the noise a search starts from."""
        return torch.Generator().manual_seed(int(self._sequence(purpose).generate_state(1, np.uint64)[0] >> 1))

    def _sequence(self, purpose: str) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, *purpose.encode()])
