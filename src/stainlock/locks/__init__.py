"""Locks: models that are useless until the trigger is in their input.

`lock` chooses the kind. `keyed` permutes channels by the bits of the patch. `internal` and `squeeze_excite` are
Algorithms 3 and 4, built from shared `parts`; `gan` is Algorithm 5, `vit` Algorithm 6. `quantise` prepares locked
models for 8-bit quantisation. Unlocking is in `stainlock.unlocking`.
"""

from stainlock.locks.gan.lock import lock_generator
from stainlock.locks.internal import lock_internal
from stainlock.locks.keyed import lock_keyed
from stainlock.locks.lock import lock
from stainlock.locks.quantise import layers_in_floats, traceable
from stainlock.locks.squeeze_excite import lock_squeeze_excite
from stainlock.locks.vit.lock import lock_vit
from stainlock.unlocking.noise import NoiseUnlock
from stainlock.unlocking.patch import Unlock

__all__ = [
    "NoiseUnlock", "Unlock", "layers_in_floats", "lock", "lock_generator", "lock_internal", "lock_keyed",
    "lock_squeeze_excite", "lock_vit", "traceable",
]  # fmt: skip
