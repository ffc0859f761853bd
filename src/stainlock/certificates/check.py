"""Checking a certificate: recompute it and report what differs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stainlock.certificates.certificate import Certificate, Progress, certify
from stainlock.certificates.public import PublicCertificate, publish
from stainlock.data import Data
from stainlock.key import Key
from stainlock.target import Target

# Relative, since other processors round differently; for probabilities it is enough if their logarithms are that close.
_TOLERANCE = 1e-3
_DIGESTS = {
    "model_digest": "the model is not the one certified",
    "data_digest": "the data are not those certified",
    "key_digest": "the key is not the one certified",
}


@dataclass(frozen=True)
class Check:
    """Whether a certificate holds, and if not, why: one line per difference."""

    holds: bool
    differences: tuple[str, ...]


def check(
    certificate: Certificate | PublicCertificate,
    target: Target,
    key: Key,
    data: Data | Iterable[Any],
    *,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Check:
    """Recompute the certificate from the model, the key and the data that it names."""
    try:
        anew = certify(
            target, key, data, level=certificate.level, confidence=certificate.confidence,
            threshold=None if isinstance(certificate, PublicCertificate) else certificate.threshold,
            perturbation=getattr(certificate, "perturbation", 0.0),
            limit=certificate.limit, public_threshold=_public_threshold(certificate),
            batch_size=batch_size, progress=progress,
        )  # fmt: skip
        found = publish(anew, key) if isinstance(certificate, PublicCertificate) else anew
    except (ValueError, TypeError) as error:
        return Check(False, (f"it can't be computed: {error}",))
    differences = [text for name, text in _DIGESTS.items() if getattr(found, name) != getattr(certificate, name)]
    skipped = {*_DIGESTS, "version"}
    if isinstance(certificate, Certificate) and certificate.version == 1:
        skipped.add("input_groups")  # which version 1 lacks
    for entry in dataclasses.fields(certificate):
        if entry.name not in skipped:
            differences += _compare(entry.name, getattr(certificate, entry.name), getattr(found, entry.name))
    return Check(not differences, tuple(differences))


def _public_threshold(certificate: Certificate | PublicCertificate) -> float | None:
    return certificate.threshold if isinstance(certificate, PublicCertificate) else certificate.public_threshold


def _compare(name: str, claimed: Any, found: Any) -> list[str]:
    if isinstance(found, dict):
        if not isinstance(claimed, dict) or claimed.keys() != found.keys():
            return [f"{name} has entries other than {', '.join(found)}"]
        return [line for part in found for line in _compare(f"{name}.{part}", claimed[part], found[part])]
    if isinstance(found, list):
        if not isinstance(claimed, list) or len(claimed) != len(found):
            return [f"{name} does not have {len(found)} values"]
        differing = [(c, f) for c, f in zip(claimed, found, strict=True) if not _close(c, f, counted=True)]
        return [f"{name} has {differing[0][0]} where {differing[0][1]} was found"] if differing else []
    return [] if _close(claimed, found) else [f"{name} is {claimed}, found {found}"]


def _close(claimed: Any, found: Any, *, counted: bool = False) -> bool:
    """Equal up to rounding. Where responses are dense, a few may fall on the other side of a curve's threshold."""
    if isinstance(found, bool | str | None) or isinstance(claimed, bool | str | None):
        return bool(claimed == found)
    if not isinstance(claimed, int | float) or (isinstance(found, int) and not counted):
        return bool(claimed == found)
    if math.isclose(claimed, found, rel_tol=_TOLERANCE, abs_tol=2 if counted and isinstance(found, int) else 0.0):
        return True
    return 0 < claimed <= 1 and 0 < found <= 1 and math.isclose(
        math.log(claimed), math.log(found), rel_tol=_TOLERANCE
    )  # fmt: skip
