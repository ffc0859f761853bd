"""Commitments: a signed digest of key and model that tells nothing, so that later a date can decide who was first.

docs/commitments.md says what one proves, and why it is made as it is. `commitment` is the file, `opening` how key and
model are sealed in it, `signing` the signature, `evidence` timestamps and logs, `check` what all this shows.
"""

from stainlock.commitments.check import Check, Rival
from stainlock.commitments.commitment import Commitment, commit
from stainlock.commitments.evidence import Timestamp, read_roots
from stainlock.commitments.signing import Signer, read_public_key

__all__ = ["Check", "Commitment", "Rival", "Signer", "Timestamp", "commit", "read_public_key", "read_roots"]
