"""Evidence of a commitment's date: RFC 3161 timestamps, checked by `rfc3161-client`, and log entries, not checked."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stainlock.commitments.signing import commit_extra
from stainlock.errors import FileError
from stainlock.storage.values import shown

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

TIME = "%Y-%m-%dT%H:%M:%SZ"
_SHA256 = "2.16.840.1.101.3.4.2.1"
_WHOLE_SECONDS = timedelta(seconds=1)  # the library drops a token's fractions of a second


@dataclass(frozen=True)
class Timestamp:
    """An authority's statement that the commitment existed between ``earliest`` and ``latest``, or before.

    ``trusted`` if its signature chains to one of the certificates that the reader trusts; else ``note`` says why not.
    """

    earliest: datetime
    latest: datetime
    trusted: bool
    note: str = ""


def parse_time(text: str) -> datetime:
    return datetime.strptime(text, TIME).replace(tzinfo=UTC)


def timestamp_request(message: bytes) -> bytes:
    """A request (DER) to post to an authority of one's choice. It needs no nonce: an old answer would be no worse."""
    with commit_extra():
        from rfc3161_client import HashAlgorithm, TimestampRequestBuilder
    builder = TimestampRequestBuilder().data(message).hash_algorithm(HashAlgorithm.SHA256)
    return builder.nonce(nonce=False).cert_request(cert_request=True).build().as_bytes()


def read_timestamp(response: bytes, message: bytes, roots: Sequence[Certificate], name: str) -> Timestamp:
    """An authority's response for this message, and whether the roots vouch for it."""
    with commit_extra():
        from rfc3161_client import VerificationError, VerifierBuilder, decode_timestamp_response
    try:
        decoded = decode_timestamp_response(response)
    except ValueError as error:
        raise FileError(
            f"{name} is not an RFC 3161 timestamp response in DER, or is truncated: {_short(error)}"
        ) from error
    try:
        info = decoded.tst_info
    except ValueError as error:
        why = "; ".join(decoded.status_string) or f"status {decoded.status}"
        raise FileError(f"{name} has no timestamp: the authority refused ({why})") from error
    imprint = info.message_imprint
    if imprint.hash_algorithm.dotted_string != _SHA256 or imprint.message != hashlib.sha256(message).digest():
        raise FileError(f"{name} is for something other than this commitment")
    trusted, note = False, "no certificates to check it with were given"
    if roots:
        try:
            trusted, note = VerifierBuilder(roots=list(roots)).build().verify_message(decoded, message), ""
        except (VerificationError, ValueError) as error:
            note = f"the given certificates don't vouch for it: {_short(error)}"
    accuracy = info.accuracy  # None if the token has none, whatever the library's types promise
    try:
        fractions = (accuracy.millis or 0) / 1e3 + (accuracy.micros or 0) / 1e6 if accuracy else 0
        within = timedelta(seconds=math.ceil(fractions) + ((accuracy.seconds or 0) if accuracy else 0))
        return Timestamp(info.gen_time - within, info.gen_time + within + _WHOLE_SECONDS, trusted, note)
    except OverflowError as error:
        raise FileError(f"{name} names no usable time") from error


def read_roots(path: str | Path) -> list[Certificate]:
    """The certificates of authorities that the reader trusts, from a PEM file."""
    with commit_extra():
        from cryptography.x509 import load_pem_x509_certificates
    try:
        found = load_pem_x509_certificates(Path(path).read_bytes())
        for certificate in found:  # the library parses their parts lazily: fail here, not later
            _ = certificate.subject, certificate.issuer, certificate.extensions, certificate.public_key()
            _ = certificate.not_valid_before_utc, certificate.signature_algorithm_oid
    except OSError as error:
        raise FileError(f"can't read certificates {path}: {error.strerror or error}") from error
    except Exception as error:  # the library raises several kinds of errors for malformed or unknown parts
        raise FileError(f"{path} has no usable certificates ({shown(_short(error))}): expected PEM") from error
    return found


def mentions(entry: Any, digest: str) -> bool:
    """Whether the digest occurs anywhere in a log entry, in hexadecimal or base64, also inside base64 values."""
    if isinstance(entry, dict):
        return any(mentions(part, digest) for part in entry.values())
    if isinstance(entry, list):
        return any(mentions(part, digest) for part in entry)
    if not isinstance(entry, str):
        return False
    raw = bytes.fromhex(digest)
    if digest in entry.lower() or base64.b64encode(raw).decode() in entry:
        return True
    try:
        inner = base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError):
        return False
    return digest.encode() in inner.lower() or base64.b64encode(raw) in inner


def _short(error: Exception) -> str:
    """The last reason in an error of the library, which quotes whole stacks of them."""
    text = str(error)
    for mark in ("Verify error: ", 'reason: "'):
        if mark in text:
            return text.rpartition(mark)[2].partition('"')[0]
    return text.partition(": ErrorStack")[0]
