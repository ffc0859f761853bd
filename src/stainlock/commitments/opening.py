"""How key and model are sealed: fixed for good by what is published, and told by it to no one without the key.

The key itself is the opening. From everything a proof uses of it comes a secret s = sha256(...), with at least the
128 bits of the key's seed behind it; HKDF makes of s, a public random salt and the signer's public key one HMAC key for
each thing sealed. Two keys or models with the same seal would be a collision of SHA-256; a seal without s is noise; a
seal copied by another signer doesn't open.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from stainlock.commitments.signing import commit_extra
from stainlock.key import Key
from stainlock.storage.files import model_digest, tensor_digest
from stainlock.target import Target

DOMAIN = b"stainlock-commitment-1"
# All facts that verification or reverting rests on. Fixed: entries that later versions of keys may have don't count.
_FACTS = ("kind", "site", "site_kind", "dimension", "additive", "schema", "firing_fraction", "reduction", "position",
          "natural_level", "base_digest", "protected_digest", "conventions", "details")  # fmt: skip


class Opening:
    """What a key says of a commitment with this salt and signer."""

    def __init__(self, key: Key, salt: bytes, public_key: bytes) -> None:
        self._secret, self._salt, self._public_key = _secret(key), salt, public_key

    @property
    def key(self) -> str:
        return self._seal("key", self._secret)

    def model(self, digest: str) -> str:
        return self._seal("model", bytes.fromhex(digest))

    def _seal(self, what: Literal["key", "model"], content: bytes) -> str:
        with commit_extra():
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        info = DOMAIN + b"|" + what.encode() + b"|" + self._public_key
        hmac_key = HKDF(SHA256(), length=32, salt=self._salt, info=info).derive(self._secret)
        return hmac.digest(hmac_key, content, "sha256").hex()


def _secret(key: Key) -> bytes:
    facts: dict[str, Any] = {name: getattr(key, name) for name in _FACTS}
    facts["seed"] = str(key.seed)
    facts["detectors"] = [
        [d.channel, d.trigger_level, d.rest_level, d.trigger.response, d.trigger.region.start, d.trigger.region.size]
        for d in key.detectors
    ]
    tensors = {f"detector.{i}": d.vector for i, d in enumerate(key.detectors)}
    tensors |= {f"trigger.{i}": d.trigger.levels for i, d in enumerate(key.detectors)}
    return hashlib.sha256(DOMAIN + b"|" + canonical(facts) + b"|" + tensor_digest(tensors).encode()).digest()


def canonical(facts: Mapping[str, Any]) -> bytes:
    """One way to write them: names sorted, no spaces, ASCII."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def suspect_digest(suspect: object) -> str | None:
    """The digest of a model or of its bare weights; None of what can only be run."""
    if isinstance(suspect, Target):
        return model_digest(suspect.model)
    if isinstance(suspect, nn.Module):
        return model_digest(suspect)
    if isinstance(suspect, Mapping):
        tensors: dict[str, Tensor] = {k: v for k, v in suspect.items() if not k.endswith("num_batches_tracked")}
        return tensor_digest(tensors)
    return None
