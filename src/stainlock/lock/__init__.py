"""Locks: models that are useless until the trigger is in their input."""

from stainlock.lock.convolutional import lock_convolutional
from stainlock.lock.gan import lock_generator
from stainlock.lock.gan_unlock import NoiseUnlock
from stainlock.lock.locking import lock
from stainlock.lock.quantising import layers_in_floats
from stainlock.lock.unlocking import Unlock
from stainlock.lock.vit import lock_vit

__all__ = ["NoiseUnlock", "Unlock", "layers_in_floats", "lock", "lock_convolutional", "lock_generator", "lock_vit"]
