"""The detectors' responses to natural inputs, and every bound on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stainlock.certificates.bounds import checked_moments
from stainlock.certificates.data_driven import clopper_pearson, theorem2
from stainlock.certificates.geometric import cantelli, theorem1, theorem1_printed
from stainlock.certificates.statistics import Statistics
from stainlock.evaluation import Data
from stainlock.key import Key
from stainlock.network.network import analyse
from stainlock.sphere import FloatArray
from stainlock.target import Target

POINTS = 40  # number of thresholds, from near 0 to a little above the weakest trigger's response
CONFIDENCE = 0.95
_BATCH = 16


def response_rows(target: Target, layer: str, keys: list[Key], data: Data, *, bounds: bool) -> list[dict[str, Any]]:
    """One row for each threshold: how many responses of all detectors exceed it; with ``bounds``, also the bounds.

    Thresholds are fractions of the weakest trigger's response.
    """
    site = analyse(target).site(layer)
    triggers = [key.trigger_response for key in keys]
    thresholds = np.linspace(0.02, 1.06, POINTS) * min(triggers)
    statistics = Statistics(
        target, site, torch.stack([key.detectors[0].vector for key in keys]), thresholds,
        groups=[site.group_of(key.detectors[0].channel) for key in keys],
    )  # fmt: skip
    statistics.add_all(pixels for pixels, _ in data.batches(target, batch_size=_BATCH))
    counts = statistics.by_position.each
    largest = statistics.maxima.tolist()
    facts = {
        "part": "bounds" if bounds else "responses", "layer": layer, "dimension": site.dimension,
        "detectors": len(keys), "least_trigger": min(triggers), "largest_trigger": max(triggers),
        "positions": statistics.samples, "largest_natural": max(largest), "added": keys[0].additive,
        "reached": [i for i, trigger in enumerate(triggers) if largest[i] >= trigger],
    }  # fmt: skip
    known = _bounds(statistics) if bounds else {}
    return [
        facts
        | {"index": k, "threshold": float(t), "exceedances": int(counts[:, k].sum())}
        | {name: float(values[k]) for name, values in known.items()}
        for k, t in enumerate(thresholds)
    ]


def _bounds(statistics: Statistics) -> dict[str, FloatArray]:
    """Bounds for one detector at one position; those for a fixed detector are averaged over the detectors."""
    moments = checked_moments(statistics)
    known: dict[str, Any] = {
        "trace": moments.trace,
        "mean_norm": moments.mean_norm,
        "dimension": statistics.law.dimension,
    }
    counts, samples = statistics.by_position.each, statistics.samples
    fixed = {
        "theorem2": np.mean([theorem2(c, samples) for c in counts], axis=0),
        "clopper_pearson": np.mean([clopper_pearson(c, samples, CONFIDENCE) for c in counts], axis=0),
    }
    random = {f.__name__: f(statistics.thresholds, **known) for f in (theorem1, theorem1_printed, cantelli)}
    return random | {"cap": np.exp(statistics.caps.log_union(1))} | fixed
