"""The commitment as a file: what is signed, the signature, and the evidence of its date that is added later."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from torch import Tensor

from stainlock.commitments.check import Check, check
from stainlock.commitments.evidence import TIME
from stainlock.commitments.opening import Opening, suspect_digest
from stainlock.commitments.signed import Signed, checked_statement
from stainlock.commitments.signing import Signer
from stainlock.errors import FileError
from stainlock.key import Key
from stainlock.numerics import is_state
from stainlock.stains.secrets import check_secrets
from stainlock.target import Target
from stainlock.verification.verify import verify

VERSION = 2


@dataclass(frozen=True)
class Commitment(Signed):
    """A signed, sealed digest of a key and a model. Nothing in it is secret; without the key it reveals nothing.

    ``created`` is the signer's own statement; only ``timestamps`` (base64 of RFC 3161 responses) show a date.

    >>> commitment = sl.commit(stained, key, sl.Signer.new(), statement="release 1.0")
    >>> commitment.statement, commitment.is_signed, commitment.opens(key)
    ('release 1.0', True, True)
    """

    WHAT = "commitment"
    FORMAT = "stainlock-commitment"
    VERSION = VERSION
    OLDER: ClassVar[dict[int, dict[str, Any]]] = {1: {}}
    HEX: ClassVar[dict[str, int]] = {"salt": 64, "key": 64, "model": 64, "public_key": 64, "signature": 128}

    created: str
    statement: str
    salt: str
    key: str
    model: str
    public_key: str
    signature: str
    timestamps: tuple[str, ...] = ()
    log_entries: tuple[dict[str, Any], ...] = ()
    format: str = FORMAT
    version: int = VERSION

    def opens(self, key: Key, model: str | None = None) -> bool:
        """Whether it was made for this key or, with ``model``, for this key and the model with this digest.

        >>> commitment = sl.commit(stained, key, sl.Signer.new())
        >>> _, another = sl.stain(target, seed=2)
        >>> commitment.opens(key), commitment.opens(another)
        (True, False)
        """
        if self.leaves_open(key):
            return False
        opening = Opening(key, bytes.fromhex(self.salt), bytes.fromhex(self.public_key), self.version)
        return secrets.compare_digest(*(
            (self.key, opening.key) if model is None else (self.model, opening.model(model))
        ))  # fmt: skip

    def leaves_open(self, key: Key) -> bool:
        """Whether it seals less of the key than verification reads: version 1, for an additive stain.

        >>> sl.commit(stained, key, sl.Signer.new()).leaves_open(key)
        False
        """
        return self.version == 1 and key.additive

    def check(self, key: Key, suspect: object = None, **options: Any) -> Check:
        """Is it for this key, and earlier than the claims of others? See `stainlock.commitments.check.check`.

        >>> found = sl.commit(stained, key, sl.Signer.new()).check(key, stained)
        >>> found.verdict, found.suspect
        ('valid', 'the committed model')
        """
        return check(self, key, suspect, **options)


def commit(
    target: Target | Mapping[str, Tensor],
    key: Key,
    signer: Signer,
    *,
    statement: str = "",
    created: datetime | None = None,
) -> Commitment:
    """Commit to a key and to the model that is stained with it: the protected one, or one made from it since.

    Bare weights are accepted too, as long as they show the stain.

    ``statement`` is public. ``created`` defaults to now, and proves nothing either way.

    >>> signer = sl.Signer.new()
    >>> commitment = sl.commit(stained, key, signer)
    >>> commitment.public_key == signer.public_key, commitment.opens(key)
    (True, True)
    """
    key.check_stain("commit to")
    check_secrets(key)
    checked_statement(statement)
    state = target.model.state_dict() if isinstance(target, Target) else target
    if not is_state(state, key.protected_digest) and not verify(target, key).stained:
        raise FileError("this key is for another model: expected the stained one, or one made from it")
    when = (created or datetime.now(UTC)).astimezone(UTC)
    salt = secrets.token_bytes(32)
    opening = Opening(key, salt, bytes.fromhex(signer.public_key), VERSION)
    unsigned = Commitment(
        created=when.strftime(TIME), statement=statement, salt=salt.hex(), key=opening.key,
        model=opening.model(suspect_digest(target) or ""), public_key=signer.public_key, signature="",
    )  # fmt: skip
    return dataclasses.replace(unsigned, signature=signer.sign(unsigned.signed_part))
