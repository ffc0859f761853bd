"""What a lock's weights look like: bare zeros, or small numbers of the layer's own kind in their place.

A trained layer has no row of one number among zeros. In disguise every zero becomes a small random number, in units of
the layer's spread: as large as exactness allows.

- What *leaks* the signal to other channels acts where the patch is, and nowhere else.
- What *feeds* other things into the signal must not move it: a step after it takes any small noise away again, while a
  signal that nothing rounds can bear very little.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stainlock.randomness import Randomness

_LEAK = 0.02
# Pooling adds the noise of thousands of positions to a signal at one of them.
_FEED_BEFORE_STEP = 1e-4
_FEED = 3e-8


@dataclass(frozen=True)
class Disguise:
    """``randomness`` None leaves everything bare; ``rounded`` says that a step takes noise off the signal.

    What is drawn for a place is the same whenever it is asked for: a model is tried out before it is written.
    """

    randomness: Randomness | None = None
    rounded: bool = False

    @property
    def bare(self) -> bool:
        return self.randomness is None

    def leaking(self, place: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Small weights by which a layer sees the signal."""
        return self._noise(_LEAK, place, weight, shape)

    def feeding(self, place: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Small weights by which the signal sees other channels."""
        return self._noise(_FEED_BEFORE_STEP if self.rounded else _FEED, place, weight, shape)

    def _noise(self, size: float, place: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.randomness is None:
            return torch.zeros(shape, dtype=torch.float64)
        spread = float(weight.double().square().mean().sqrt())
        drawn = self.randomness.secret(f"disguise {place}").standard_normal(shape)
        return size * spread * torch.from_numpy(np.asarray(drawn))


BARE = Disguise()
