"""Legacy: how version 0.1.0 drew a stain's secrets, with NumPy's PCG64. Only to verify keys of formats 1 and 2.

NumPy guarantees the bits of PCG64, but not those of `standard_normal`, `permutation`, `choice` and `integers`.
Nothing new is drawn here.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from stainlock.numerics import Randomness, sample_sphere
from stainlock.stains.message import Mask


def legacy_vectors(seed: int, count: int, dimension: int) -> Tensor:
    return sample_sphere(count, dimension, generator=Randomness(seed).secret("detector"))


def legacy_mask(seed: int, places: int) -> Mask:
    stream = Randomness(seed).secret("message")
    return Mask(stream.permutation(places), stream.choice(np.array([-1.0, 1.0]), places))


def legacy_classes(seed: int, count: int, total: int) -> list[int]:
    return [int(c) for c in Randomness(seed).secret("classes").integers(0, total, count)]
