"""Every bound of a certificate, from one pass of statistics, and what each of them assumes.

The event is that a sample makes *some* detector of the key respond above the threshold. A sample is a position, or an
image, which fires if any of its positions does. Bounds for one random detector at one random position become bounds
for the event by the union bound: times the number of detectors, and for images times that of positions. A detector that
is the best of several draws counts as all of them (see `Law`).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from stainlock.certificates.data_driven import clopper_pearson, theorem2
from stainlock.certificates.geometric import cantelli, theorem1, theorem1_printed, theorem1_sharp
from stainlock.certificates.statistics import Moments, Statistics
from stainlock.sphere import FloatArray

Level = Literal["position", "image"]
SMALLEST = 1e-300  # smaller bounds are reported as this; their logarithms are not cut off

_MOMENTS = (
    "the detector is uniform on the sphere and independent of the inputs; mean and covariance of the features are the"
    " sample's, so it is an estimate; it is about a random detector, not this one"
)
_UNION = {
    "position": "the chance of one position; with several detectors, the sum over them",
    "image": "the sum over all positions of an image and over all detectors (union bound)",
}
_COUNTED = {
    "position": "positions of one image count as independent samples, as in the paper, which they are not",
    "image": "images are independent samples",
}
ASSUMPTIONS = {
    "theorem1": f"Theorem 1 with its constant corrected: {_MOMENTS}",
    "theorem1_printed": f"Theorem 1 with the constant that the paper prints, for comparison: {_MOMENTS}",
    "theorem1_sharp": f"Theorem 1 with the best possible constant: {_MOMENTS}",
    "cantelli": f"Cantelli's inequality: {_MOMENTS}",
    "cap": "the exact probability for a random detector, uniform on the sphere and independent of the inputs; averaged"
    " over the sample's norms, so it is an estimate; it is about a random detector, not this one",
    "cap_upper": "the cap with the sample's uncertainty: holds at the confidence stated, for a random detector, images"
    " being independent samples",
    "theorem2": "about this very detector, the threshold being fixed before the sample was seen",
    "clopper_pearson": "about this very detector at the confidence stated, the threshold being fixed before the sample"
    " was seen",
    "clopper_pearson_images": "Clopper–Pearson for the share of images with an exceeding position, which is at least"
    " the share of positions: images are independent samples",
}


def assumptions(level: Level) -> dict[str, str]:
    """What each bound assumes at this level."""
    texts = dict(ASSUMPTIONS)
    for name in texts:
        if name in ("theorem2", "clopper_pearson"):
            texts[name] += f"; {_COUNTED[level]}"
        elif name != "clopper_pearson_images":
            texts[name] += f"; {_UNION[level]}"
    if level == "image":
        del texts["clopper_pearson_images"]
    return texts


def log_bounds(statistics: Statistics, level: Level, confidence: float) -> dict[str, FloatArray]:
    """Natural logarithms of every bound at each of the statistics' thresholds; 0 (a bound of 1) where there is none."""
    moments = checked_moments(statistics)
    law = statistics.law
    every = law.draws * len(statistics.detectors) * (statistics.positions if level == "image" else 1)
    logs: dict[str, FloatArray] = {}
    for bound in (theorem1, theorem1_printed, theorem1_sharp, cantelli):
        values = bound(
            statistics.free_thresholds, trace=moments.trace, mean_norm=moments.mean_norm, dimension=law.dimension
        )
        logs[bound.__name__] = np.log(values) + math.log(every)
    logs["cap"] = statistics.caps.log_union(every)
    logs["cap_upper"] = np.log(statistics.caps.upper_bound(every, confidence))
    images = statistics.images
    exceeding, samples = (
        (statistics.by_image.any, images) if level == "image" else (statistics.by_position.any, statistics.samples)
    )
    logs["theorem2"] = np.log(theorem2(exceeding, samples))
    logs["clopper_pearson"] = np.log(clopper_pearson(exceeding, samples, confidence))
    if level == "position":
        logs["clopper_pearson_images"] = np.log(clopper_pearson(statistics.by_image.any, images, confidence))
    return {name: np.minimum(values, 0.0) for name, values in logs.items()}


def checked_moments(statistics: Statistics) -> Moments:
    """The moments; a ValueError if no bound can follow from the sample."""
    if statistics.images < 2:
        raise ValueError(f"expected at least 2 images, got {statistics.images}")
    moments = statistics.moments()
    if moments.constant(statistics.target.dtype):
        raise ValueError(
            f"the features at {statistics.site.name} are the same for all {statistics.images} images: expected"
            " natural inputs that differ"
        )
    return moments
