"""Checking a commitment: is it for this key, and is it earlier than the claims of others?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from torch import nn

from stainlock.commitments.evidence import Timestamp, parse_time
from stainlock.commitments.opening import suspect_digest
from stainlock.errors import FileError
from stainlock.key import Key
from stainlock.numerics import is_model
from stainlock.target import Target

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from stainlock.commitments.commitment import Commitment


@dataclass(frozen=True)
class Rival:
    """A rival's commitment, of which only signature and timestamps can be checked, and which of the two is earlier."""

    digest: str
    signer: str
    created: str
    proven: str | None
    timestamps: tuple[dict[str, str | bool], ...]
    log_entries_unchecked: int
    earlier: Literal["this", "rival", "undecided"]


@dataclass(frozen=True)
class Check:
    """A commitment that is signed, unaltered and opens with the key; ``verdict`` is about its date.

    ``valid``: no date was asked for. ``earlier``: shown to be made before ``published`` and before every rival's.
    ``not earlier``: that is not so, or not shown; ``reasons`` says why. ``proven`` is the time before which a trusted
    timestamp shows it existed. ``suspect`` says how the suspect is related to the commitment. ``model_checked`` is true
    if the sealed model could be identified: as the suspect, or as the model that the key was made with.
    """

    verdict: Literal["valid", "earlier", "not earlier"]
    reasons: tuple[str, ...]
    digest: str
    signer: str
    created: str
    statement: str
    proven: str | None
    timestamps: tuple[dict[str, str | bool], ...]
    log_entries_unchecked: int
    suspect: Literal["the committed model", "the original", "another model", "not compared"]
    model_checked: bool
    published: str | None
    rivals: tuple[Rival, ...]

    @property
    def holds(self) -> bool:
        return self.verdict != "not earlier"


def check(
    commitment: Commitment,
    key: Key,
    suspect: object = None,
    *,
    rivals: Sequence[Commitment] = (),
    published: datetime | None = None,
    roots: Sequence[Certificate] = (),
    signer: str | None = None,
) -> Check:
    """What a commitment shows for this key.

    A commitment that was altered, is for another key or by another ``signer`` is an error. ``published`` is when the
    suspect was first seen: a key that was fixed later could have been made to fit it. ``roots`` are the certificates
    of the authorities whose timestamps count, the same for both sides.
    """
    if not all(one.is_signed for one in (commitment, *rivals)):
        raise FileError("the commitment, or a rival's, was altered after it was signed")
    if published is not None and published.tzinfo is None:
        raise ValueError(f"expected a time with its zone, got {published}")
    if commitment.digest in [rival.digest for rival in rivals]:
        raise ValueError("expected a rival's commitment to compare with, got the same one twice")
    if commitment.leaves_open(key):
        raise FileError("the commitment is of version 1, which does not seal the row that an additive stain is added"
                        " to: it proves nothing for this key, commit again")  # fmt: skip
    if not commitment.opens(key):
        raise FileError("the commitment is for another key, or another signer copied it: this key does not open it")
    if signer is not None and signer != commitment.public_key:
        raise FileError(f"the commitment is signed by another: expected {signer}, got {commitment.public_key}")
    stamps = commitment.read_timestamps(roots)
    mine = _first(stamps)
    digest = suspect_digest(suspect)
    is_suspect = digest is not None and commitment.opens(key, digest)
    failures: list[str] = []
    successes: list[str] = []
    seen: list[Rival] = []
    if published is not None:
        published = published.astimezone(UTC)
        failed, reason = _before(commitment, mine, published)
        (failures if failed else successes).append(reason)
    for rival in rivals:
        rival_stamps = rival.read_timestamps(roots)
        theirs = _first(rival_stamps)
        earlier, reason = _order(mine, theirs)
        (successes if earlier == "this" else failures).append(f"{reason} (rival {rival.digest[:12]})")
        seen.append(Rival(rival.digest, rival.public_key, rival.created, _proven(theirs), _shown(rival_stamps),
                          len(rival.log_entries), earlier))  # fmt: skip
    asked = published is not None or bool(rivals)
    return Check(
        verdict="not earlier" if failures else "earlier" if asked else "valid", reasons=(*failures, *successes),
        digest=commitment.digest, signer=commitment.public_key, created=commitment.created,
        statement=commitment.statement, proven=_proven(mine),
        timestamps=_shown(stamps), log_entries_unchecked=len(commitment.log_entries),
        suspect=_relation(is_suspect, digest, suspect, key),
        model_checked=is_suspect or commitment.opens(key, key.protected_digest),
        published=_text(published) if published is not None else None, rivals=tuple(seen),
    )  # fmt: skip


def _before(commitment: Commitment, mine: Timestamp | None, published: datetime) -> tuple[bool, str]:
    when = _text(published)
    if mine is None and parse_time(commitment.created) >= published:
        return True, f"it is later than the model it claims, by its own date: {commitment.created}, not before {when}"
    if mine is None:
        return True, f"no trusted timestamp shows that it is earlier than the model it claims, of {when}"
    if mine.latest > published:
        return True, f"it is later than the model it claims: its first trusted timestamp is of {_text(mine.latest)}," \
                     f" not before {when}"  # fmt: skip
    return False, f"it is earlier than the model it claims: {_text(mine.latest)}, before {when}"


def _order(mine: Timestamp | None, theirs: Timestamp | None) -> tuple[Literal["this", "rival", "undecided"], str]:
    """Whoever can show the earlier date wins; a rival who can show none has none."""
    if mine is None and theirs is None:
        return "undecided", "neither it nor the rival's has a trusted timestamp: no one's date is shown"
    if mine is None or theirs is None:
        if mine is not None:
            return "this", f"it existed by {_text(mine.latest)}; the rival's has no trusted timestamp"
        return "rival", "the rival's has a trusted timestamp, and it has none"
    dates = f"{_text(mine.latest)}, the rival's {_text(theirs.latest)}"
    if mine.latest <= theirs.earliest:
        return "this", f"it is earlier than the rival's: {dates}"
    if theirs.latest <= mine.earliest:
        return "rival", f"the rival's is earlier: {dates}"
    return "undecided", f"the timestamps are too close to tell which is earlier: {dates}"


def _first(stamps: Sequence[Timestamp]) -> Timestamp | None:
    return min((stamp for stamp in stamps if stamp.trusted), key=lambda stamp: stamp.latest, default=None)


def _relation(
    is_committed: bool, digest: str | None, suspect: object, key: Key
) -> Literal["the committed model", "the original", "another model", "not compared"]:
    if digest is None:
        return "not compared"
    if is_committed:
        return "the committed model"
    model = suspect.model if isinstance(suspect, Target) else suspect
    original = is_model(model, key.base_digest) if isinstance(model, nn.Module) else digest == key.base_digest
    return "the original" if original else "another model"


def _shown(stamps: Sequence[Timestamp]) -> tuple[dict[str, str | bool], ...]:
    return tuple({"time": _text(stamp.latest), "trusted": stamp.trusted, "note": stamp.note} for stamp in stamps)


def _proven(stamp: Timestamp | None) -> str | None:
    return _text(stamp.latest) if stamp is not None else None


def _text(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
