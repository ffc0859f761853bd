"""How key and model are sealed: the published values bind them, and reveal nothing to anyone without the key.

The key itself is the opening. A secret s = sha256(...) is computed from the whole key except `NOT_SEALED`; it has at
least the 128 bits of the key's seed behind it. From s, a public random salt and the signer's public key, HKDF derives
one HMAC key for each thing sealed. Two keys or models with the same seal would be a collision of SHA-256; without s a
seal is noise; a seal copied by another signer doesn't open.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from collections.abc import Collection, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from stainlock.commitments.signing import commit_extra
from stainlock.key import Key
from stainlock.numerics import model_digest, tensor_digest
from stainlock.storage.records import canonical
from stainlock.target import Target

# Fields of a key that no verdict reads, each with the reason. Every other field is sealed, new ones by default.
NOT_SEALED = {"revert": "data that restores the original; base_digest and protected_digest seal both ends of it"}
# The fields that version 1 sealed. The row removed when additive stains are verified was not among them.
_FIRST_FACTS = ("kind", "site", "site_kind", "dimension", "additive", "schema", "firing_fraction", "reduction",
                "position", "natural_level", "base_digest", "protected_digest", "conventions", "details")  # fmt: skip


def domain(version: int) -> bytes:
    return f"stainlock-commitment-{version}".encode()


class Opening:
    """The seals that a key gives with this salt and signer."""

    def __init__(self, key: Key, salt: bytes, public_key: bytes, version: int) -> None:
        self._secret = _first_secret(key) if version == 1 else _secret(key, version)
        self._salt, self._public_key, self._domain = salt, public_key, domain(version)

    @property
    def key(self) -> str:
        return self._seal("key", self._secret)

    def model(self, digest: str) -> str:
        return self._seal("model", bytes.fromhex(digest))

    def _seal(self, what: Literal["key", "model"], content: bytes) -> str:
        with commit_extra():
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        info = self._domain + b"|" + what.encode() + b"|" + self._public_key
        hmac_key = HKDF(SHA256(), length=32, salt=self._salt, info=info).derive(self._secret)
        return hmac.digest(hmac_key, content, "sha256").hex()


def _secret(key: Key, version: int) -> bytes:
    return hashlib.sha256(domain(version) + b"|" + canonical(_plain(key, NOT_SEALED))).digest()


def _plain(value: Any, but: Collection[str] = ()) -> Any:
    """A value as JSON, exact to the last bit, without the fields in ``but``. Tensors become digests.

    A field that has its default value is left out. So a field added later, with a default that means the previous
    behaviour, does not change older commitments. A missing field and a present one differ, so this still binds.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.name not in but and not _is_default(value, f)]
        return {f.name: _plain(getattr(value, f.name)) for f in fields}
    if isinstance(value, Tensor):
        return {"sha256": tensor_digest({"": value})}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"expected plain data in a key, got {type(value).__name__}")


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    given = getattr(value, field.name)
    return made is not dataclasses.MISSING and type(given) is type(made) and bool(given == made)


def _first_secret(key: Key) -> bytes:
    """The secret of version 1. It does not seal all of an additive key, so version 1 is refused for those."""
    facts: dict[str, Any] = {name: getattr(key, name) for name in _FIRST_FACTS}
    facts["seed"] = str(key.seed)
    facts["detectors"] = [
        [d.channel, d.trigger_level, d.rest_level, d.trigger.response, d.trigger.region.start, d.trigger.region.size]
        for d in key.detectors
    ]
    tensors = {f"detector.{i}": d.vector for i, d in enumerate(key.detectors)}
    tensors |= {f"trigger.{i}": d.trigger.levels for i, d in enumerate(key.detectors)}
    return hashlib.sha256(domain(1) + b"|" + canonical(facts) + b"|" + tensor_digest(tensors).encode()).digest()


def suspect_digest(suspect: object) -> str | None:
    """The digest of a model or of bare weights; None for anything else, such as a model behind an API."""
    if isinstance(suspect, Target):
        return model_digest(suspect.model)
    if isinstance(suspect, nn.Module):
        return model_digest(suspect)
    if isinstance(suspect, Mapping):
        tensors: dict[str, Tensor] = {k: v for k, v in suspect.items() if not k.endswith("num_batches_tracked")}
        return tensor_digest(tensors)
    return None
