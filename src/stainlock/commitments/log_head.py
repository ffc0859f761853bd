"""A commitment to a registry's log: its length and last link, signed. No entry up to it can be changed unnoticed.

The last link is a hash over a random start and every entry: it reveals nothing about them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from stainlock.commitments.evidence import TIME
from stainlock.commitments.signed import Signed, checked_statement
from stainlock.commitments.signing import Signer

FORMAT, VERSION = "stainlock-log-commitment", 1


@dataclass(frozen=True)
class LogCommitment(Signed):
    """``entries`` is the number of entries in the log, ``chain`` its last link."""

    WHAT = "log's commitment"
    FORMAT = FORMAT
    VERSION = VERSION
    HEX: ClassVar[dict[str, int]] = {"chain": 64, "public_key": 64, "signature": 128}

    created: str
    statement: str
    entries: int
    chain: str
    public_key: str
    signature: str
    timestamps: tuple[str, ...] = ()
    log_entries: tuple[dict[str, Any], ...] = ()
    format: str = FORMAT
    version: int = VERSION

    @classmethod
    def _malformed(cls, facts: dict[str, Any]) -> str | None:
        if type(facts["entries"]) is not int or facts["entries"] < 1:
            return "entries must be a whole number from 1"
        return super()._malformed(facts)


def commit_log(entries: int, chain: str, signer: Signer, *, statement: str = "") -> LogCommitment:
    """Sign a log's length and last link."""
    checked_statement(statement)
    unsigned = LogCommitment(
        created=datetime.now(UTC).strftime(TIME), statement=statement, entries=entries, chain=chain,
        public_key=signer.public_key, signature="",
    )  # fmt: skip
    return dataclasses.replace(unsigned, signature=signer.sign(unsigned.signed_part))
