"""A commitment as an in-toto statement over a bundle's files, in the form of OpenSSF's `model_signing`.

    subject     the bundle, by the sha256 over its files' sha256, sorted by name
    predicate   ``serialization`` and ``resources`` as model_signing 1.0 writes them, which ignores other fields, and
                ``stainlock_commitment``, the content of the commitment's file
    envelope    DSSE, signed with an elliptic curve key (P-256, P-384 or P-521), in a Sigstore bundle

So ``model_signing verify key BUNDLE --signature FILE --public_key PEM`` accepts it, and tools that carry such
signatures also carry the commitment. The commitment keeps its own Ed25519 signature and opens with the stain's key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stainlock.commitments.commitment import Commitment
from stainlock.commitments.signing import commit_extra, read_private_key
from stainlock.errors import FileError
from stainlock.storage.records import parse_json, read_json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
PAYLOAD = "application/vnd.in-toto+json"
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
FIELD = "stainlock_commitment"
# Names that model_signing ignores in a model's folder by default.
_IGNORED = (".git", ".gitattributes", ".github", ".gitignore")


def statement(folder: Path, commitment: Commitment) -> dict[str, Any]:
    """The in-toto statement: which files the model is made of, and the commitment to it."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in _IGNORED
    )
    if not names:
        raise FileError(f"expected a bundle's folder to sign, found no files in {folder}")
    if any((folder / name).is_symlink() for name in names):
        raise FileError(f"{folder} has symbolic links in it: sign a folder of plain files")
    digests = [hashlib.sha256((folder / name).read_bytes()).digest() for name in names]
    resources = [
        {"name": name, "algorithm": "sha256", "digest": d.hex()} for name, d in zip(names, digests, strict=True)
    ]
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": folder.resolve().name, "digest": {"sha256": hashlib.sha256(b"".join(digests)).hexdigest()}}
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(_IGNORED),
            },
            "resources": resources,
            FIELD: json.loads(commitment.to_json()),
        },
    }  # fmt: skip


def attestation(folder: Path, commitment: Commitment, key_file: Path) -> str:
    """The signed statement as a file for model_signing; ``key_file`` is an elliptic-curve private key in PEM."""
    private = _private_key(key_file)
    with commit_extra():
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    by_size = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    payload = json.dumps(statement(folder, commitment), indent=2).encode()
    signature = private.sign(authenticated(payload), ECDSA(by_size[private.key_size]))
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    bundle = {
        "mediaType": BUNDLE,
        "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(public).hexdigest()}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }  # fmt: skip
    return json.dumps(bundle) + "\n"


def authenticated(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: what is signed."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)


def load_commitment(path: Path) -> Commitment:
    """A commitment from its own file, or from a file for model_signing that contains it.

    Its own signature is checked either way. The elliptic-curve signature is not: that is for model_signing, which
    knows whose key to trust.
    """
    found = read_json(path, "commitment")
    if not isinstance(found, dict) or "dsseEnvelope" not in found:
        return Commitment.load(path)
    try:
        payload = parse_json(base64.b64decode(found["dsseEnvelope"]["payload"], validate=True))
        commitment = payload["predicate"][FIELD]
        if not isinstance(commitment, dict):
            raise TypeError("not an object")
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise FileError(f"{path} contains no stainlock commitment: expected {FIELD} in its predicate") from error
    return Commitment.load(path, commitment)


def _private_key(path: Path) -> EllipticCurvePrivateKey:
    with commit_extra():
        from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    private = read_private_key(path, "an elliptic-curve private key")
    if not isinstance(private, EllipticCurvePrivateKey) or private.curve.name not in (
        "secp256r1", "secp384r1", "secp521r1",
    ):  # fmt: skip
        raise FileError(f"{path} holds a private key of another kind: model_signing takes P-256, P-384 and P-521")
    return private
