"""Commitments: a signed digest of key and model that tells nothing, so that later a date can decide who was first.

docs/commitments.md says what one proves, and why it is made as it is. `commitment` is the file, `opening` how key and
model are sealed in it, `signing` the signature, `evidence` timestamps and logs, `check` what all this shows. `log_head`
is the same for the audit log of a registry of clients, and `signed` what both files share.
"""

from stainlock.commitments.attestation import attestation, load_commitment
from stainlock.commitments.check import Check, Rival
from stainlock.commitments.commitment import Commitment, commit
from stainlock.commitments.evidence import Timestamp, read_roots
from stainlock.commitments.log_head import LogCommitment, commit_log
from stainlock.commitments.signed import Signed
from stainlock.commitments.signing import Signer, read_public_key

__all__ = [
    "Check", "Commitment", "LogCommitment", "Rival", "Signed", "Signer", "Timestamp", "attestation", "commit",
    "commit_log", "load_commitment", "read_public_key", "read_roots",
]  # fmt: skip
