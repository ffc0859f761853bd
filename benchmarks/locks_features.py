"""Locks of networks without labels, judged by their outputs: an object detector's backbone, random classifiers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

import zoo
from stainlock import Target, lock
from stainlock.target import evaluation_mode, synthetic_inputs
from zoo_random import settled

SIZE = 224
RANDOM = ("vgg16", "mobilenet_v3_large", "efficientnet_b0")
CASES: dict[str, tuple[dict[str, Any], ...]] = {
    "ssdlite_plainpad": ({"kind": "squeeze-excite", "blocks": "existing"},),
    "vgg16": ({"kind": "internal"}, {"kind": "squeeze-excite", "blocks": "inserted"}),
    "mobilenet_v3_large": (
        {"kind": "squeeze-excite", "blocks": "existing"},
        {"kind": "squeeze-excite", "blocks": "existing", "gates": 3},
        {"kind": "internal"},
    ),
    "efficientnet_b0": ({"kind": "squeeze-excite", "blocks": "existing"},),
}
MOST_DIFFERENCE, LEAST_RUIN = 1e-3, 0.5


def feature_table(detectors: int) -> list[str]:
    """Print exactness, cost and damage to the outputs for each lock; return the goals missed."""
    columns = ["network", "weights", "lock", "disruptors", "site", "patch"]
    print("\n| " + " | ".join([*columns, "unlocked − edited", "edited − original", "locked − original"]) + " |")
    print("|" + "---|" * 9)
    failures = []
    for name, cases in CASES.items():
        if name not in RANDOM and (reason := zoo.missing(name)):
            print(f"skipped: {reason}", file=sys.stderr)
            continue
        target = settled(name, SIZE, 100) if name in RANDOM else getattr(zoo, name)()
        images = _images(name, target)
        for case in cases:
            rows = [_measured(target, images, case, seed) for seed in range(detectors)]
            exact, cost = (max(row[i] for row in rows) for i in (0, 1))
            ruin = min(row[2] for row in rows)
            key = rows[0][3]
            cells = (
                name, "random" if name in RANDOM else "real", case["kind"], str(len(key.details["disruptors"])),
                key.site, "×".join(map(str, key.detectors[0].trigger.region.size)), f"{exact:.1e}", f"{cost:.2f}",
                f"{ruin:.2f}",
            )  # fmt: skip
            print("| " + " | ".join(cells) + " |", flush=True)
            if exact > MOST_DIFFERENCE:
                failures.append(f"{name} {case}: unlocked within {MOST_DIFFERENCE} of edited")
            if ruin < LEAST_RUIN:
                failures.append(f"{name} {case}: locked outputs differ by at least {LEAST_RUIN} of their variation")
    return failures


def _images(name: str, target: Target) -> Tensor:
    if name in RANDOM:
        return synthetic_inputs(target, 8, torch.Generator().manual_seed(5))
    return zoo.natural(name, 16)[0]


def _measured(target: Target, images: Tensor, case: dict[str, Any], seed: int) -> tuple[float, float, float, Any]:
    locked, key = lock(target, seed=seed, **case)
    edited, patched = key.edited(locked), key.unlock_transform(normalise=False)(images)
    original, ours, unlocked, reference, ruined = (
        _outputs(t, x)
        for t, x in ((target, images), (edited, images), (locked, patched), (edited, patched), (locked, images))
    )
    return _largest(unlocked, reference), _typical(ours, original), _typical(ruined, original), key


def _outputs(target: Target, pixels: Tensor) -> list[Tensor]:
    with evaluation_mode(target.model), torch.inference_mode():
        outputs = target.run_traced(pixels)
    return (
        [outputs] if isinstance(outputs, Tensor) else list(outputs.values() if isinstance(outputs, dict) else outputs)
    )


def _largest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference at any output, relative to the largest value there."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


def _typical(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The root mean square difference at the output that differs least, relative to its variation."""
    return min(float((a - b).norm() / (b - b.mean(0)).norm()) for a, b in zip(ours, theirs, strict=True))
