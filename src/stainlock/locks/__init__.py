"""Locks: models that are useless until the trigger is in their input."""

from stainlock.locks.convolutional import lock_convolutional
from stainlock.locks.gan.lock import lock_generator
from stainlock.locks.gan.unlock import NoiseUnlock
from stainlock.locks.keyed import lock_keyed
from stainlock.locks.lock import lock
from stainlock.locks.quantise import layers_in_floats
from stainlock.locks.unlock import Unlock
from stainlock.locks.vit.lock import lock_vit

__all__ = [
    "NoiseUnlock",
    "Unlock",
    "layers_in_floats",
    "lock",
    "lock_convolutional",
    "lock_generator",
    "lock_keyed",
    "lock_vit",
]
