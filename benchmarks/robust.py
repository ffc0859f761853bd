"""Triggers sent to services: hits after JPEG, resizing and cropping, for plain and robust stains.

``python benchmarks/robust.py`` stains each model once plainly and ``--keys`` times with ``robust``. It prints how many
triggers are given their class after each change, the p-value behind a service that compresses at JPEG 95 (with all
questions asked, and by the sequential test with its number of queries), and accuracy before and after. Exit status 1
if, of the robust stains of a model, fewer than 9 in 10 have all triggers hit behind JPEG 95 with p ≤ 1e−6, or if
accuracy falls by more than 0.1 points on average.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor

import stainlock as sl
import zoo
from stainlock.stains.proof import usual_count
from stainlock.target import evaluation_mode
from stainlock.transmission.changes import Change, jpeg, usual_changes
from stainlock.verification.questions import judged, pictures
from stainlock.verification.sequential import verify_sequentially

MODELS = ("efficientnet_lite0", "resnet50")
SERVICE, SIGNIFICANT, MOST_LOST, ENOUGH = 95, 1e-6, 0.1, 0.9


def labels(target: sl.Target, levels: Tensor, change: Change | None = None) -> list[int]:
    """The answers of a service that applies ``change`` to pictures first."""
    found: list[int] = []
    with evaluation_mode(target.model), torch.no_grad():
        for batch in levels.split(8):
            pixels = target.from_bytes(batch)
            found += target.predict(change(pixels) if change else pixels).argmax(1).tolist()
    return found


def hits(target: sl.Target, key: sl.Key, change: Change | None = None) -> int:
    triggers = torch.stack([d.trigger.image(target) for d in key.detectors])
    given = labels(target, triggers, change)
    return sum(own == wanted for own, wanted in zip(given, key.details["classes"], strict=True))


def behind_service(target: sl.Target, key: sl.Key) -> tuple[float, float, int]:
    """p-values behind the service, with all questions and sequentially, and the queries of the sequential test."""
    asked = pictures(key)
    given = labels(target, asked.flatten(0, 1), jpeg(target, SERVICE))
    answers = [[[label] for label in given[i : i + asked.shape[1]]] for i in range(0, len(given), asked.shape[1])]
    one_by_one = verify_sequentially(
        lambda questions: [answers[t][q] for t, q in questions], key, look_alikes=asked.shape[1] - 1
    )
    return judged(key, answers).p_value, one_by_one.verdict.p_value, one_by_one.asked


def accuracy(target: sl.Target, pixels: Tensor, classes: Tensor) -> float:
    given = torch.tensor(labels(target, target.to_bytes(pixels)))
    return float((given == classes).double().mean()) * 100


def run(name: str, keys: int, count: int | None, images: int, steps: int) -> bool:
    target: sl.Target = getattr(zoo, name)()
    pixels, classes = zoo.natural(name, images)
    assert classes is not None
    before = accuracy(target, pixels, classes)
    count = count or usual_count(target, robust=True)
    changes: dict[str, Change | None] = {"as it is": None, **usual_changes(target)}
    print(f"\n{name}: {count} triggers, top-1 {before:.2f} % of {len(pixels)} images", flush=True)
    print("| stain | " + " | ".join(changes) + " | p behind JPEG 95 | sequential p | queries | top-1 | seconds |")
    print("|---|" + "--:|" * (len(changes) + 5), flush=True)
    held, lost = [], []
    for seed in (None, *range(1, keys + 1)):
        start = time.perf_counter()
        stained, key = sl.stain(
            target, schema="output", count=count, seed=seed or 1, robust=seed is not None, steps=steps
        )
        seconds = time.perf_counter() - start
        found = {change: hits(stained, key, make) for change, make in changes.items()}
        p, sequential, queries = behind_service(stained, key)
        after = accuracy(stained, pixels, classes)
        if seed is not None:
            held.append(found[f"JPEG {SERVICE}"] == count and p <= SIGNIFICANT)
            lost.append(before - after)
        words = "plain, key 1" if seed is None else f"robust, key {seed}"
        cells = [words, *map(str, found.values()), f"{p:.1g}", f"{sequential:.1g}", str(queries), f"{after:.2f}"]
        print(f"| {' | '.join(cells)} | {seconds:.0f} |", flush=True)
    print(f"{name}: {sum(held)} of {len(held)} robust stains have all {count} triggers hit behind JPEG {SERVICE} with"
          f" p ≤ {SIGNIFICANT:g}; {statistics.mean(lost):.2f} points of top-1 lost on average,"
          f" {max(lost):.2f} at most", flush=True)  # fmt: skip
    return sum(held) >= ENOUGH * len(held) and statistics.mean(lost) <= MOST_LOST


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--keys", type=int, default=10, help="robust stains per model")
    parser.add_argument("--count", type=int, help="triggers per stain (default: as many as `stain` takes)")
    parser.add_argument("--images", type=int, default=500, help="images to measure accuracy on")
    parser.add_argument(
        "--steps", type=int, default=36, help="steps of a plain trigger search; robust ones take twice as many"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = []
    for name in options.models:
        if reason := zoo.missing(name):
            print(f"{name} is skipped: {reason}")
            continue
        kept.append(run(name, options.keys, options.count, options.images, options.steps))
    return 0 if kept and all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
