"""Certificates: how likely natural inputs are to make a key's detectors fire. Anyone with the key can check the file.

The file is a secret: with the model and the images its numbers reveal which channel is stained. `publish` makes one
that may be shown to anyone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stainlock.certificates.bounds import SMALLEST, Level, assumptions, checked_moments, log_bounds
from stainlock.certificates.law import Law
from stainlock.certificates.statistics import Statistics
from stainlock.data import Data
from stainlock.errors import FileError, SiteError
from stainlock.key import Key
from stainlock.network.network import Site, analyse
from stainlock.numerics import model_digest, tensor_digest
from stainlock.sphere import FloatArray
from stainlock.storage.checks import check_certificate
from stainlock.storage.durable import write_file
from stainlock.storage.records import read_record
from stainlock.target import Target, check_target

FORMAT = "stainlock-certificate"
VERSION = 2
SECRET = "secret, as the key is: with the model and the images these numbers tell which channel is stained"
CURVE_POINTS = 32  # thresholds of the curve, from near 0 to a little above the trigger's response
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Certificate:
    """Bounds on the chance that a natural sample makes some detector of the key respond above the threshold.

    ``level`` says what a sample is: an image, which exceeds if any position does, overlapping ones included, or one of
    the non-overlapping positions of an image, as in the paper. Positions of one image depend on each other, so
    Clopper–Pearson by position fails more often than stated: quote the bound by image. A bound of 1 is no bound.
    ``curve`` has the same for a range of thresholds. Keep the certificate as secret as the key, and show others only
    what `publish` returns.

    >>> certificate = sl.certify(stained, key, sl.Tensors(images))
    >>> certificate.images, certificate.exceedances
    (4, 0)
    >>> certificate.largest_response < certificate.threshold
    True
    """

    site: str
    level: Level
    confidence: float
    threshold: float
    trigger_response: float
    samples: int
    exceedances: int
    largest_response: float
    bounds: dict[str, float]
    log10_bounds: dict[str, float | None]
    assumptions: dict[str, str]
    images: int
    positions: int
    detectors: int
    dimension: int
    trace: float
    mean_norm: float
    perturbation: float
    limit: int | None
    model_digest: str
    data_digest: str
    key_digest: str
    curve: dict[str, list[float]] = field(repr=False)
    input_groups: int = 1
    public_threshold: float | None = None  # see `publish`
    secret: str = SECRET
    format: str = FORMAT
    version: int = VERSION

    def to_json(self) -> str:
        """The content of the file that `save` writes.

        >>> import json
        >>> json.loads(sl.certify(stained, key, sl.Tensors(images)).to_json())["images"]
        4
        """
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all, readable by its owner alone.

        >>> sl.certify(stained, key, sl.Tensors(images)).save("certificate.json")
        >>> sl.Certificate.load("certificate.json").site == key.site
        True
        """
        write_file(Path(path), self.to_json().encode(), secret=True)

    @staticmethod
    def load(path: str | Path) -> Certificate:
        """Read a certificate; a damaged one raises `FileError`.

        >>> sl.Certificate.load("nowhere.json")
        Traceback (most recent call last):
        stainlock.errors.FileError: ...
        """
        names = {f.name for f in dataclasses.fields(Certificate)}
        first = {"input_groups": 1, "public_threshold": None, "secret": SECRET}  # what version 1 lacks
        facts = read_record(path, "certificate", FORMAT, VERSION, names, older={1: first})
        try:
            check_certificate(facts)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is not a complete certificate: {error}") from error
        return Certificate(**facts)


def certify(
    target: Target,
    key: Key,
    data: Data | Iterable[Any],
    *,
    level: Level = "image",
    confidence: float = 0.95,
    threshold: float | None = None,
    perturbation: float = 0.0,
    public_threshold: float | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Certificate:
    """Bounds on false positives of the key's detectors, from natural data that the detectors are independent of.

    ``target`` is the stained model or the original: features before the site are the same. ``data`` are `Images`,
    `Tensors` or the like, or batches of pixels, with or without labels. ``threshold`` is for v·φ(x), v being a unit
    vector; by default it is where the detector begins to fire. Choose it without looking at the data. With
    ``perturbation`` δ (see `measured_perturbation`) the bounds hold for a changed model whose responses are within δ
    of this one's: for it to exceed Δ, this one must exceed Δ − δ, and that is what is counted and bounded.

    ``public_threshold`` (see `stainlock.certificates.public`) is one more threshold, for `publish`.

    With a lock's key, a false positive is a natural input that makes the detector fire: a weaker response can't unlock.

    >>> certificate = sl.certify(stained, key, sl.Tensors(images), confidence=0.99)
    >>> certificate.bounds["clopper_pearson"] < 1
    True
    """
    check_target(target)
    if key.schema == "keyed":
        raise ValueError(
            "a keyed lock has no detectors: use stainlock.certificates.certify_keyed, whose bound needs no data"
        )
    law = Law.of(key)
    if level not in ("position", "image"):
        raise ValueError(f"expected level position or image, got {level!r}")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
    Δ = key.natural_threshold if threshold is None else float(threshold)
    if not math.isfinite(Δ) or not 0 <= perturbation < math.inf:
        raise ValueError(f"expected a finite threshold and a perturbation ≥ 0, got {Δ} and {perturbation}")
    site = site_of_key(target, key)
    # At least one detector must exceed the threshold for a lock to open, or for a stain to seem present.
    detectors, R = key.detectors, key.trigger_response
    if public_threshold is not None and (perturbation or not 0 < public_threshold < math.inf):
        raise ValueError(f"expected a public threshold above 0 and no perturbation, got {public_threshold}")
    points = [Δ] if public_threshold is None else [Δ, public_threshold]
    thresholds = np.unique([*np.linspace(0.02, 1.06, CURVE_POINTS) * R, *points]) - perturbation
    statistics = Statistics(
        target, site, torch.stack([d.vector for d in detectors]), thresholds,
        groups=[site.group_of(d.channel) for d in detectors], overlapping=level == "image", law=law,
    )  # fmt: skip
    hasher = hashlib.sha256()
    for pixels in _pixel_batches(data, target, batch_size, limit, progress):
        _refuse_triggers(pixels, target, key)
        if not hasattr(data, "digest"):
            hasher.update(pixels.detach().cpu().contiguous().numpy().tobytes())
        statistics.add(pixels)
    logs = log_bounds(statistics, level, confidence)
    moments = checked_moments(statistics)
    counts = statistics.by_image.any if level == "image" else statistics.by_position.any
    here = int(np.searchsorted(thresholds, Δ - perturbation))
    values = {name: np.maximum(np.exp(log), SMALLEST) for name, log in logs.items()}
    return Certificate(
        site=site.name, level=level, confidence=confidence, threshold=Δ, trigger_response=R,
        samples=statistics.images if level == "image" else statistics.samples, exceedances=int(counts[here]),
        largest_response=float(statistics.maxima.max()),
        bounds={name: float(value[here]) for name, value in values.items()},
        log10_bounds={name: _log10(log[here]) for name, log in logs.items()},
        assumptions=assumptions(level), images=statistics.images, positions=statistics.positions,
        detectors=len(detectors), dimension=law.dimension, trace=moments.trace, mean_norm=moments.mean_norm,
        perturbation=perturbation, limit=limit, model_digest=model_digest(target.model),
        data_digest=data.digest() if hasattr(data, "digest") else hasher.hexdigest(),
        key_digest=detectors_digest(key),
        curve={"threshold": (thresholds + perturbation).tolist(), "exceedances": counts.tolist()}
        | {name: value.tolist() for name, value in values.items()},
        input_groups=site.groups, public_threshold=public_threshold,
    )  # fmt: skip


def site_of_key(target: Target, key: Key) -> Site:
    """The key's site in this model; a SiteError says why it isn't there."""
    if mismatch := key.matches(target):
        raise SiteError(f"the key is for a model that takes other inputs: {mismatch}")
    site = analyse(target).site(key.site)
    if site.dimension != key.dimension or site.kind != key.site_kind:
        raise SiteError(f"{site.name} is a {site.kind} of dimension {site.dimension}, the key's a {key.site_kind} of"
                        f" {key.dimension}: expected the model that the key was made with")  # fmt: skip
    return site


def detectors_digest(key: Key) -> str:
    """Identifies the detectors without revealing them: a secret of this many dimensions can't be guessed."""
    return tensor_digest({str(i): d.vector for i, d in enumerate(key.detectors)})


def _pixel_batches(
    data: Data | Iterable[Any], target: Target, batch_size: int, limit: int | None, progress: Progress | None
) -> Iterator[Tensor]:
    if hasattr(data, "batches"):
        yield from (pixels for pixels, _ in data.batches(target, batch_size=batch_size, limit=limit, progress=progress))
        return
    left = math.inf if limit is None else limit
    for batch in data:
        pixels = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(pixels, Tensor) or tuple(pixels.shape[1:]) != target.input_shape:
            got = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
            raise ValueError(f"expected batches of pixels (N, {', '.join(map(str, target.input_shape))}), got {got}")
        pixels = pixels[: int(min(left, len(pixels)))]
        left -= len(pixels)
        if len(pixels):
            yield target.from_bytes(pixels) if pixels.dtype == torch.uint8 else pixels
        if left <= 0:
            return


def _refuse_triggers(pixels: Tensor, target: Target, key: Key) -> None:
    """Bounds are for inputs independent of the detector, which an image optimised for it is not."""
    for d in key.detectors:
        levels = target.to_bytes(d.trigger.region.cut(pixels)).cpu()
        same = (levels == d.trigger.levels).flatten(1).all(1)
        if bool(same.any()):
            raise ValueError(
                "the data contain the key's trigger, which is tuned to the detector: expected inputs that are"
                " independent of it, so take it out"
            )


def _log10(log: FloatArray | float) -> float | None:
    """None for a probability of 0."""
    return float(log) / math.log(10) if math.isfinite(float(log)) else None
