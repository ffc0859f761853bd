"""False-positive rates and their bounds on real models: ``python benchmarks/certificates.py [--quick]``.

For each layer, 20 random detectors with their triggers. As in the paper, one half of the photographs gives the bounds
and the other half the empirical rate, at thresholds from half to all of the weakest trigger's response. The last
columns are the paper's bounds divided by ours, and the time of the statistics divided by that of the bare forward pass
to the layer.

Exit status 1 if an empirical rate is above a bound, or if the statistics take too long. The cap is not a bound but the
expected rate, so rates fall on both sides of it. It fails only if the excess is more than sampling error.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch

import zoo
from stainlock.certificates import (
    Statistics,
    cantelli,
    clopper_pearson,
    theorem1,
    theorem1_printed,
    theorem1_sharp,
    theorem2,
)
from stainlock.evaluation import Data
from stainlock.network.network import Site, analyse, layer_input
from stainlock.numerics import sample_sphere
from stainlock.target import Target, evaluation_mode
from stainlock.trigger import find_triggers

LAYERS = {
    "resnet50": ("layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2", "layer4.0.conv2"),
    "efficientnet_lite0": ("blocks.2.0.conv_pw", "blocks.3.0.conv_pw", "blocks.4.0.conv_pw", "blocks.6.0.conv_pw"),
}
FRACTIONS = np.array([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
BOUNDS = (
    "theorem1_printed",
    "theorem1",
    "theorem1_sharp",
    "cantelli",
    "cap",
    "cap_upper",
    "theorem2",
    "clopper_pearson",
)
CONFIDENCE = 0.95
HIGHEST_OVERHEAD = 0.15


def gather(target: Target, site: Site, data: Data, images: int, thresholds: np.ndarray, vectors: torch.Tensor,
           by_image: bool) -> tuple[Statistics, Statistics]:  # fmt: skip
    """Statistics of every other photograph, for the bounds, and of the others, for the empirical rate."""
    halves = tuple(Statistics(target, site, vectors, thresholds, overlapping=by_image) for _ in range(2))
    for pixels, _ in data.batches(target, batch_size=32, limit=images):
        for half, offset in zip(halves, (0, 1), strict=True):
            if len(pixels) > offset:
                half.add(pixels[offset::2])
    return halves[0], halves[1]


def bounds_of(half: Statistics, by_image: bool) -> dict[str, np.ndarray]:
    """Bounds for one detector: averaged over all random detectors; the last two averaged over these 20."""
    moments = half.moments()
    facts = {"trace": moments.trace, "mean_norm": moments.mean_norm, "dimension": half.site.dimension}
    windows = half.positions if by_image else 1
    result = {f.__name__: np.minimum(windows * f(half.thresholds, **facts), 1.0)
              for f in (theorem1_printed, theorem1, theorem1_sharp, cantelli)}  # fmt: skip
    result["cap"] = np.exp(half.caps.log_union(windows))
    result["cap_upper"] = half.caps.upper_bound(windows, CONFIDENCE)
    counts, samples = (half.by_image.each, half.images) if by_image else (half.by_position.each, half.samples)
    result["theorem2"] = theorem2(counts, samples).mean(0)
    result["clopper_pearson"] = clopper_pearson(counts, samples, CONFIDENCE).mean(0)
    return result


def overhead(target: Target, site: Site, pixels: torch.Tensor, full: Statistics) -> float:
    """Processor time of the statistics ÷ that of the bare forward pass to the layer, each the best of five runs."""
    probe = Statistics(target, site, full.detectors, full.thresholds, overlapping=full.overlapping)
    probe.add(pixels)
    bare, added = [], []
    for _ in range(5):
        start = time.process_time()
        with evaluation_mode(target.model), torch.no_grad():
            features = layer_input(target, site, pixels)
        middle = time.process_time()
        probe.add_features(features, len(pixels))
        added.append(time.process_time() - middle)
        bare.append(middle - start)
    return min(added) / min(bare)


def sampling_error(counts: np.ndarray, samples: int) -> np.ndarray:
    """Three standard errors of the mean rate, estimated from the spread over detectors."""
    rates = counts / samples
    return 3 * rates.std(0, ddof=1) / np.sqrt(len(rates))


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.01 else f"{value:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="60 photographs and 6 detectors")
    parser.add_argument("--level", choices=("position", "image"), default="position")
    parser.add_argument("--steps", type=int, default=20, help="steps of the trigger search")
    options = parser.parse_args()
    by_image = options.level == "image"
    images, detectors = (60, 6) if options.quick else (500, 20)
    print(f"| model, layer | d | Δ/R | {options.level}s | empirical | " + " | ".join(BOUNDS)
          + " | printed/cap | theorem2/cp | overhead |")  # fmt: skip
    print("|" + "---|" * (len(BOUNDS) + 8))
    failures = []
    for name, layers in LAYERS.items():
        if reason := zoo.missing(name):
            print(f"skipped: {reason}", file=sys.stderr)
            continue
        target, data = getattr(zoo, name)(), zoo.natural_data(name)
        network = analyse(target)
        few, _ = next(data.batches(target, batch_size=16, limit=16))
        for layer in layers:
            site = network.site(layer)
            vectors = sample_sphere(detectors, site.dimension, generator=np.random.default_rng(0))
            triggers = find_triggers(
                target, site, vectors, generator=torch.Generator().manual_seed(0), steps=options.steps
            )
            weakest = min(trigger.response for trigger in triggers)
            first, second = gather(target, site, data, images, FRACTIONS * weakest, vectors, by_image)
            bounds = bounds_of(first, by_image)
            counts, samples = (
                (second.by_image.each, second.images) if by_image else (second.by_position.each, second.samples)
            )
            empirical = counts.mean(0) / samples
            cost = overhead(target, site, few, first)
            natural = max(float(first.maxima.max()), float(second.maxima.max()))
            if cost > HIGHEST_OVERHEAD:
                failures.append(f"{layer}: statistics cost {cost:.0%} of the bare forward pass")
            error = sampling_error(counts, samples)
            for k, fraction in enumerate(FRACTIONS):
                for bound in BOUNDS:
                    allowed = bounds[bound][k] + (error[k] if bound == "cap" else 0)
                    told = f"{layer} at {fraction:.1f} R: {empirical[k]:.2g} is above {bound}, {bounds[bound][k]:.2g}"
                    if empirical[k] > allowed:
                        failures.append(told)
                    elif empirical[k] > bounds[bound][k]:
                        print(f"{told}, within sampling error ({counts[:, k].sum()} exceedances)", file=sys.stderr)
                cap = bounds["cap"][k]  # 0 if no norm reaches the threshold
                factor = f"{bounds['theorem1_printed'][k] / cap:.0e}" if cap else "∞"
                print(f"| {name} {layer} | {site.dimension} | {fraction:.1f} | {samples}×{detectors} | "
                      f"{number(empirical[k])} | "
                      + " | ".join(number(bounds[bound][k]) for bound in BOUNDS)
                      + f" | {factor} | {bounds['theorem2'][k] / bounds['clopper_pearson'][k]:.0f} | {cost:.1%} |",
                      flush=True)  # fmt: skip
            print(f"{layer}: weakest trigger {weakest / natural:.1f} × the largest natural response", file=sys.stderr)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
