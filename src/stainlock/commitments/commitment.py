"""The commitment as a file: what is signed, what signs it, and the evidence of its date that comes later."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stainlock.commitments.check import Check, check
from stainlock.commitments.evidence import TIME, Timestamp, mentions, parse_time, read_timestamp, timestamp_request
from stainlock.commitments.opening import Opening, canonical, domain, suspect_digest
from stainlock.commitments.signing import Signer, is_signed
from stainlock.errors import FileError
from stainlock.key import Key
from stainlock.stains.secrets import check_secrets
from stainlock.storage.durable import refuse_existing, write_file
from stainlock.storage.files import is_state, read_record
from stainlock.target import Target
from stainlock.verification.verify import verify

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

FORMAT = "stainlock-commitment"
VERSION = 2
OLDER: dict[int, dict[str, Any]] = {1: {}}
_HEX = {"salt": 64, "key": 64, "model": 64, "public_key": 64, "signature": 128}  # digits
_MOST_EVIDENCE, _LONGEST_STAMP = 32, 2**17  # timestamps, and log entries; characters of one
_EVIDENCE = ("signature", "timestamps", "log_entries")  # not signed


@dataclass(frozen=True)
class Commitment:
    """A signed, sealed digest of a key and a model. Nothing in it is secret; without the key it tells nothing.

    ``created`` is the signer's own word; only ``timestamps`` (base64 of RFC 3161 responses) show a date.

    >>> commitment = sl.commit(stained, key, sl.Signer.new(), statement="release 1.0")
    >>> commitment.statement, commitment.is_signed, commitment.opens(key)
    ('release 1.0', True, True)
    """

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

    @property
    def signed_part(self) -> bytes:
        """The bytes that the signature is for: everything but the signature and the evidence of a date.

        >>> commitment = sl.commit(stained, key, sl.Signer.new(), statement="release 1.0")
        >>> b"release 1.0" in commitment.signed_part
        True
        """
        facts = dataclasses.asdict(self)
        return domain(self.version) + b"\n" + canonical({name: facts[name] for name in facts if name not in _EVIDENCE})

    @property
    def message(self) -> bytes:
        """What a timestamp is for: the signed part and its signature.

        >>> commitment = sl.commit(stained, key, sl.Signer.new())
        >>> commitment.message.startswith(commitment.signed_part)
        True
        """
        return self.signed_part + bytes.fromhex(self.signature)

    @property
    def digest(self) -> str:
        """sha256 of `message`: all that has to be published anywhere to fix a date.

        >>> len(sl.commit(stained, key, sl.Signer.new()).digest)
        64
        """
        return hashlib.sha256(self.message).hexdigest()

    @property
    def is_signed(self) -> bool:
        """Whether the signature is that of its public key over everything it signs.

        >>> import dataclasses
        >>> commitment = sl.commit(stained, key, sl.Signer.new())
        >>> dataclasses.replace(commitment, statement="something else").is_signed
        False
        """
        return is_signed(self.signed_part, self.signature, self.public_key)

    def opens(self, key: Key, model: str | None = None) -> bool:
        """Whether it was made for this key, or with this key for the model of this digest.

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
        """Whether it seals less of the key than verification reads: the first version, of an additive stain.

        >>> sl.commit(stained, key, sl.Signer.new()).leaves_open(key)
        False
        """
        return self.version == 1 and key.additive

    def check(self, key: Key, suspect: object = None, **options: Any) -> Check:
        """Is it for this key, and earlier than what is said about others? See `stainlock.commitments.check.check`.

        >>> found = sl.commit(stained, key, sl.Signer.new()).check(key, stained)
        >>> found.verdict, found.suspect
        ('valid', 'the committed model')
        """
        return check(self, key, suspect, **options)

    def timestamp_request(self) -> bytes:
        """A request for a timestamp (RFC 3161), to be sent to an authority.

        >>> isinstance(sl.commit(stained, key, sl.Signer.new()).timestamp_request(), bytes)
        True
        """
        return timestamp_request(self.message)

    def read_timestamps(self, roots: Sequence[Certificate] = ()) -> list[Timestamp]:
        """Its timestamps, checked: each is for this commitment, and signed by an authority under ``roots`` if given.

        >>> sl.commit(stained, key, sl.Signer.new()).read_timestamps()
        []
        """
        return [read_timestamp(base64.b64decode(t), self.message, roots, "its timestamp") for t in self.timestamps]

    def with_timestamp(self, response: bytes, name: str = "the response") -> Commitment:
        """A copy with an authority's response attached, which must be for this commitment.

        >>> sl.commit(stained, key, sl.Signer.new()).with_timestamp(b"not a response")
        Traceback (most recent call last):
        stainlock.errors.FileError: ...
        """
        read_timestamp(response, self.message, (), name)
        added = base64.b64encode(response).decode()
        return self._with("timestamps", added)

    def with_log_entry(self, entry: Any, name: str = "the entry") -> Commitment:
        """A copy with a log's entry, in which this commitment's digest must stand. Nothing else of it is checked.

        >>> commitment = sl.commit(stained, key, sl.Signer.new())
        >>> logged = commitment.with_log_entry({"sha256": commitment.digest, "logIndex": 7})
        >>> len(logged.log_entries)
        1
        """
        if not isinstance(entry, dict):
            raise FileError(f"{name} is not a log's entry: expected a JSON object")
        if not mentions(entry, self.digest):
            raise FileError(f"{name} does not name this commitment: expected its digest {self.digest} in it")
        return self._with("log_entries", entry)

    def _with(self, name: str, added: Any) -> Commitment:
        attached = (*(one for one in getattr(self, name) if one != added), added)
        if len(attached) > _MOST_EVIDENCE:
            raise FileError(f"expected at most {_MOST_EVIDENCE} {name.replace('_', ' ')}, got {len(attached)}")
        changed: dict[str, Any] = {name: attached}
        return dataclasses.replace(self, **changed)

    def to_json(self) -> str:
        """The content of the file that `save` writes.

        >>> import json
        >>> json.loads(sl.commit(stained, key, sl.Signer.new()).to_json())["format"]
        'stainlock-commitment'
        """
        first = {"format": self.format, "version": self.version}
        return json.dumps(first | dataclasses.asdict(self), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write a new file, whole or not at all.

        >>> sl.commit(stained, key, sl.Signer.new()).save("commitment.json")
        >>> sl.Commitment.load("commitment.json").opens(key)
        True
        """
        refuse_existing(Path(path))
        write_file(Path(path), self.to_json().encode())

    @staticmethod
    def load(path: str | Path) -> Commitment:
        """Read a commitment; one that is damaged, or not as it was signed, gets one clear line.

        >>> sl.Commitment.load("nowhere.json")
        Traceback (most recent call last):
        stainlock.errors.FileError: ...
        """
        names = {f.name for f in dataclasses.fields(Commitment)}
        facts = read_record(path, "commitment", FORMAT, VERSION, names, older=OLDER)
        if reason := _malformed(facts):
            raise FileError(f"{path} is not a valid commitment: {reason}")
        for name in ("timestamps", "log_entries"):
            facts[name] = tuple(facts[name])
        commitment = Commitment(**facts)
        if not commitment.is_signed:
            raise FileError(f"{path} was altered after it was signed, or never signed: its signature does not match")
        try:
            commitment.read_timestamps()
        except FileError as error:
            raise FileError(f"{path}: {error}") from error
        if not all(mentions(entry, commitment.digest) for entry in commitment.log_entries):
            raise FileError(f"{path}: its log entry is for something else than this commitment")
        return commitment


def commit(
    target: Target | Mapping[str, Tensor],
    key: Key,
    signer: Signer,
    *,
    statement: str = "",
    created: datetime | None = None,
) -> Commitment:
    """Commit to a key and to the model that is stained with it: the protected one, or what became of it since.

    Its bare weights will do, as long as they show the stain.

    ``statement`` is public. ``created`` is now unless given, and proves nothing either way.

    >>> signer = sl.Signer.new()
    >>> commitment = sl.commit(stained, key, signer)
    >>> commitment.public_key == signer.public_key, commitment.opens(key)
    (True, True)
    """
    key.check_stain("commit to")
    check_secrets(key)
    if not is_printable(statement):
        raise ValueError("expected a statement of one line, at most 1000 characters, without control characters")
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


def is_printable(statement: str) -> bool:
    """Others will print it: nothing in it may steer a terminal."""
    return len(statement) <= 1000 and statement.isprintable()


def _malformed(facts: dict[str, Any]) -> str | None:
    for name, digits in _HEX.items():
        if not isinstance(facts[name], str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", facts[name]):
            return f"{name} must be {digits} hexadecimal digits"
    if not isinstance(facts["statement"], str) or not is_printable(facts["statement"]):
        return "statement must be a line of text"
    for name, kind in (("timestamps", str), ("log_entries", dict)):
        if not isinstance(facts[name], list) or not all(isinstance(item, kind) for item in facts[name]):
            return f"{name} must be a list"
        if len(facts[name]) > _MOST_EVIDENCE:
            return f"{name} must be at most {_MOST_EVIDENCE}, it has {len(facts[name])}"
    if any(len(stamp) > _LONGEST_STAMP for stamp in facts["timestamps"]):
        return f"timestamps must have at most {_LONGEST_STAMP} characters"
    try:
        parse_time(facts["created"])
    except (TypeError, ValueError):
        return "created must be a time like 2026-01-31T12:00:00Z"
    try:
        for stamp in facts["timestamps"]:
            base64.b64decode(stamp, validate=True)
    except (binascii.Error, ValueError):
        return "timestamps must be base64"
    return None
