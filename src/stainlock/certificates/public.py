"""The part of a certificate that may be published: bounds that hold, and nothing that reveals the stained channel.

The full certificate has numbers that depend on the secret detector v to many digits: its largest response to the
images, the threshold (a fraction of its trigger's response), how many images exceed which threshold. Anyone with the
model and the images can compute the same for every channel and see which one fits. So only these are published:

- a threshold Δ' derived from other detectors: nine tenths of the threshold at which the weakest of sixteen random ones,
  with triggers found as the key's was, would fire, rounded down. Only if v fires below it, about once in sixteen times,
  is Δ' halved;
- bounds for a *random* detector at Δ', which depend on the features and Δ' alone, and hold at Δ ≥ Δ' since they fall
  as Δ grows;
- how many samples exceed Δ', rounded up to a power of ten, and the bounds that follow for this very detector.

The site is not named. If a layer's inputs are in groups, features would reveal the group, so nothing is published.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from stainlock.certificates.bounds import Level
from stainlock.certificates.certificate import Certificate, Progress, detectors_digest, site_of_key
from stainlock.certificates.data_driven import clopper_pearson, theorem2
from stainlock.certificates.decoys import find_decoys
from stainlock.errors import FileError
from stainlock.key import Key
from stainlock.storage.checks import check_public_certificate
from stainlock.storage.durable import write_file
from stainlock.storage.records import read_json, read_record
from stainlock.target import Target

FORMAT = "stainlock-public-certificate"
VERSION = 1
_OF_RANDOM_DETECTORS = ("theorem1", "theorem1_sharp", "cantelli", "cap", "cap_upper")
_DIGITS = 2
_DECOYS, _PART = 16, 0.9


@dataclass(frozen=True)
class PublicCertificate:
    """A certificate without anything that would reveal the stained channel.

    ``threshold`` is what a response must exceed; ``covers_firing`` says that the key's detectors fire only above it.
    ``exceedances`` is at least the number of samples that exceeded it. ``key_digest`` is sha256 over the key's seed and
    its detectors: only someone with the key can show that it is this key's.
    """

    level: Level
    confidence: float
    threshold: float
    covers_firing: bool
    samples: int
    exceedances: int
    bounds: dict[str, float]
    assumptions: dict[str, str]
    images: int
    detectors: int
    limit: int | None
    model_digest: str
    data_digest: str
    key_digest: str
    format: str = FORMAT
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        write_file(Path(path), self.to_json().encode())

    @staticmethod
    def load(path: str | Path) -> PublicCertificate:
        names = {f.name for f in dataclasses.fields(PublicCertificate)}
        facts = read_record(path, "public certificate", FORMAT, VERSION, names)
        try:
            check_public_certificate(facts)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is not a complete public certificate: {error}") from error
        return PublicCertificate(**facts)


def weakest_decoy(target: Target, key: Key, *, progress: Progress | None = None) -> float:
    """The smallest trigger response among some random detectors at the key's site."""
    site = site_of_key(target, key)
    return min(decoy.response for decoy in find_decoys(target, site, key, _DECOYS, progress))


def public_threshold(key: Key, weakest: float) -> float:
    """A threshold that may be published, at most the one at which the key's detectors fire."""
    if not 0 < weakest < math.inf or key.natural_threshold <= 0:
        raise ValueError("this certificate can't be published: expected triggers' responses above 0")
    threshold = float(2 ** (math.floor(4 * math.log2(_PART * key.firing_fraction * weakest)) / 4))
    while threshold > key.natural_threshold:
        threshold /= 2
    return threshold


def publish(certificate: Certificate, key: Key) -> PublicCertificate:
    """The public part of the key's certificate, which must have been made with a `public_threshold`."""
    if certificate.key_digest != detectors_digest(key):
        raise ValueError("expected the key that the certificate is for, got another")
    if certificate.public_threshold is None:
        raise ValueError("expected a certificate that was made with a public threshold to publish from")
    if certificate.input_groups != 1:
        raise ValueError(
            "this certificate can't be published: the layer's inputs are in groups, and its numbers reveal the group"
        )
    threshold = certificate.public_threshold
    curve = certificate.curve
    here = curve["threshold"].index(threshold)
    exceedances = min(_rounded_up(int(curve["exceedances"][here])), certificate.samples)
    bounds = {name: curve[name][here] for name in _OF_RANDOM_DETECTORS}
    bounds["theorem2"] = theorem2(exceedances, certificate.samples)
    bounds["clopper_pearson"] = clopper_pearson(exceedances, certificate.samples, certificate.confidence)
    if certificate.level == "position":
        images = min(exceedances, certificate.images)  # no more images exceed than positions do
        bounds["clopper_pearson_images"] = clopper_pearson(images, certificate.images, certificate.confidence)
    return PublicCertificate(
        level=certificate.level, confidence=certificate.confidence, threshold=threshold,
        covers_firing=threshold <= key.natural_threshold, samples=certificate.samples, exceedances=exceedances,
        bounds={name: _bound_rounded_up(float(value)) for name, value in bounds.items()},
        assumptions={name: certificate.assumptions[name] for name in bounds}, images=certificate.images,
        detectors=certificate.detectors, limit=certificate.limit, model_digest=certificate.model_digest,
        data_digest=certificate.data_digest, key_digest=_key_digest(key),
    )  # fmt: skip


def read_certificate(path: str | Path) -> Certificate | PublicCertificate:
    """A certificate of either kind."""
    try:
        is_public = read_json(Path(path), "certificate")["format"] == FORMAT
    except (FileError, KeyError, TypeError):
        is_public = False  # the other loader says what is wrong
    return PublicCertificate.load(path) if is_public else Certificate.load(path)


def _key_digest(key: Key) -> str:
    """It includes the seed: a digest of v alone could be compared with those of the model's rows."""
    return hashlib.sha256(f"{FORMAT}|{key.seed}|{detectors_digest(key)}".encode()).hexdigest()


def _rounded_up(count: int) -> int:
    return 10 ** len(str(count - 1)) if count > 1 else 10 * count


def _bound_rounded_up(value: float) -> float:
    """To two digits, never below the value."""
    if value >= 1:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(value)) - _DIGITS + 1)
    rounded = float(f"{math.ceil(value / unit * (1 - 1e-12)) * unit:.{_DIGITS}g}")
    return min(1.0, rounded if rounded >= value * (1 - 1e-9) else value)
