"""What all signed files share: the signer, the signed part, and the evidence of its date that is added later."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from stainlock.commitments.evidence import Timestamp, mentions, parse_time, read_timestamp, timestamp_request
from stainlock.commitments.signing import is_signed
from stainlock.errors import FileError
from stainlock.storage.durable import refuse_existing, write_file
from stainlock.storage.records import canonical, read_record

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

_MOST_EVIDENCE, _LONGEST_STAMP = 32, 2**17  # most timestamps or log entries; most characters per timestamp
_EVIDENCE = ("signature", "timestamps", "log_entries")  # not signed


class Signed:
    """Base of frozen dataclasses with these fields and their own; everything but `_EVIDENCE` is signed."""

    WHAT: ClassVar[str]
    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]
    OLDER: ClassVar[Mapping[int, dict[str, Any]]] = {}
    HEX: ClassVar[Mapping[str, int]]  # fields in hexadecimal, with their number of digits

    format: str
    version: int
    created: str
    statement: str
    public_key: str
    signature: str
    timestamps: tuple[str, ...]
    log_entries: tuple[dict[str, Any], ...]

    @property
    def signed_part(self) -> bytes:
        """The signed bytes: everything except the signature and the evidence of a date.

        >>> commitment = sl.commit(stained, key, sl.Signer.new(), statement="release 1.0")
        >>> b"release 1.0" in commitment.signed_part
        True
        """
        signed = {name: fact for name, fact in self._facts().items() if name not in _EVIDENCE}
        return f"{self.FORMAT}-{self.version}".encode() + b"\n" + canonical(signed)

    @property
    def message(self) -> bytes:
        """The timestamped bytes: the signed part and its signature.

        >>> commitment = sl.commit(stained, key, sl.Signer.new())
        >>> commitment.message.startswith(commitment.signed_part)
        True
        """
        return self.signed_part + bytes.fromhex(self.signature)

    @property
    def digest(self) -> str:
        """sha256 of `message`: publishing it anywhere is enough to fix a date.

        >>> len(sl.commit(stained, key, sl.Signer.new()).digest)
        64
        """
        return hashlib.sha256(self.message).hexdigest()

    @property
    def is_signed(self) -> bool:
        """Whether the signature is valid for the signed part and the public key.

        >>> import dataclasses
        >>> commitment = sl.commit(stained, key, sl.Signer.new())
        >>> dataclasses.replace(commitment, statement="something else").is_signed
        False
        """
        return is_signed(self.signed_part, self.signature, self.public_key)

    def _facts(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]

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

    def with_timestamp(self, response: bytes, name: str = "the response") -> Self:
        """A copy with an authority's response attached, which must be for this commitment.

        >>> sl.commit(stained, key, sl.Signer.new()).with_timestamp(b"not a response")
        Traceback (most recent call last):
        stainlock.errors.FileError: ...
        """
        read_timestamp(response, self.message, (), name)
        added = base64.b64encode(response).decode()
        return self._with("timestamps", added)

    def with_log_entry(self, entry: Any, name: str = "the entry") -> Self:
        """A copy with a log entry attached, which must contain this commitment's digest. Nothing else in it is checked.

        >>> commitment = sl.commit(stained, key, sl.Signer.new())
        >>> logged = commitment.with_log_entry({"sha256": commitment.digest, "logIndex": 7})
        >>> len(logged.log_entries)
        1
        """
        if not isinstance(entry, dict):
            raise FileError(f"{name} is not a log entry: expected a JSON object")
        if not mentions(entry, self.digest):
            raise FileError(f"{name} does not name this commitment: expected its digest {self.digest} in it")
        return self._with("log_entries", entry)

    def _with(self, name: str, added: Any) -> Self:
        attached = (*(one for one in getattr(self, name) if one != added), added)
        if len(attached) > _MOST_EVIDENCE:
            raise FileError(f"expected at most {_MOST_EVIDENCE} {name.replace('_', ' ')}, got {len(attached)}")
        changed: dict[str, Any] = {name: attached}
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]

    def to_json(self) -> str:
        """The content of the file that `save` writes.

        >>> import json
        >>> json.loads(sl.commit(stained, key, sl.Signer.new()).to_json())["format"]
        'stainlock-commitment'
        """
        first = {"format": self.format, "version": self.version}
        return json.dumps(first | self._facts(), indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write a new file, completely or not at all.

        >>> sl.commit(stained, key, sl.Signer.new()).save("commitment.json")
        >>> sl.Commitment.load("commitment.json").opens(key)
        True
        """
        refuse_existing(Path(path))
        write_file(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path, carried: dict[str, Any] | None = None) -> Self:
        """Read a file; `FileError` if it is damaged or was altered after signing.

        ``carried`` is the parsed content, if it comes from a file of another kind that contains it.

        >>> sl.Commitment.load("nowhere.json")
        Traceback (most recent call last):
        stainlock.errors.FileError: ...
        """
        names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        facts = read_record(path, cls.WHAT, cls.FORMAT, cls.VERSION, names, older=cls.OLDER, found=carried)
        if reason := cls._malformed(facts):
            raise FileError(f"{path} is not a valid {cls.WHAT}: {reason}")
        for name in ("timestamps", "log_entries"):
            facts[name] = tuple(facts[name])
        found = cls(**facts)
        if not found.is_signed:
            raise FileError(f"{path} was altered after it was signed, or never signed: its signature does not match")
        try:
            found.read_timestamps()
        except FileError as error:
            raise FileError(f"{path}: {error}") from error
        if not all(mentions(entry, found.digest) for entry in found.log_entries):
            raise FileError(f"{path}: its log entry is for something other than this commitment")
        return found

    @classmethod
    def _malformed(cls, facts: dict[str, Any]) -> str | None:
        for name, digits in cls.HEX.items():
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


def is_printable(statement: str) -> bool:
    """Others will print the statement: it must not contain terminal control characters."""
    return len(statement) <= 1000 and statement.isprintable()


def checked_statement(statement: str) -> None:
    if not is_printable(statement):
        raise ValueError("expected a statement of one line, at most 1000 characters, without control characters")
