"""Locks: models that are useless until the trigger patch is in the corner of their input."""

from stainlock.lock.internal import lock
from stainlock.lock.unlocking import Unlock

__all__ = ["Unlock", "lock"]
