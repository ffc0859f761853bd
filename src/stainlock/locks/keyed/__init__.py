"""The keyed lock: the patch is the key, and the file holds nothing that opens it."""

from stainlock.locks.keyed.certificate import KeyedCertificate, certify_keyed
from stainlock.locks.keyed.lock import lock_keyed
from stainlock.locks.keyed.structure import Structure, file_view

__all__ = ["KeyedCertificate", "Structure", "certify_keyed", "file_view", "lock_keyed"]
