"""Tests of exactness whose outcome no processor decides.

Kernels of one processor sum in another order than those of the next, and each order rounds differently. Two ways to
keep that out of a test:

- In float64. A copy of the model in `double` is stained or locked, and what was promised to be equal is compared with
  `EXACT`: rounding leaves some 1e-13 of the outputs there, a mistake in the weights 1e-4 and more.
- Where float32 is the point (two processes, exported files), within `rounding`, which follows from the type's epsilon
  and the length of the sums.

Tests of either kind are marked ``exact``: `make test` runs them a second time with other kernels.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from stainlock import Key, Target

# Of the largest output: a thousand times what float64 leaves after a deep network, a thousandth of any real mistake.
EXACT = 1e-9


def double(target: Target) -> Target:
    """A copy in float64."""
    return target.with_model(copy.deepcopy(target.model).double())


def unlocked_inputs(key: Key, target: Target, images: Tensor) -> Tensor:
    """Images with the patch in the model's own type; `Key.unlock` normalises in float32, as a client does."""
    return target.normalise(key.unlock_transform(normalise=False)(images))


def rounding(model: nn.Module, dtype: torch.dtype = torch.float32) -> float:
    """How far two orders of summing can drive a model's outputs apart, as a part of the largest output.

    A sum of n products rounds by about √n·ε of their size in any order, errors of single steps being independent; two
    orders differ by as much, and what L layers add, each ≤ √n·ε, is at most L·√n·ε. n is the longest sum of any layer,
    L the number of layers that sum; the factor 4 is for batches of many outputs, whose largest error is looked at.
    """
    sums = [p.shape[1:].numel() for p in model.parameters() if p.dim() > 1]
    return 4 * len(sums) * math.sqrt(max(sums)) * torch.finfo(dtype).eps
