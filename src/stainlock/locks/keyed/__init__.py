"""The keyed lock: the patch is the key, and the file holds nothing that opens it."""

from stainlock.locks.keyed.lock import lock_keyed
from stainlock.locks.keyed.structure import Structure, file_view

__all__ = ["Structure", "file_view", "lock_keyed"]
