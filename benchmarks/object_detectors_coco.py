"""Locks and stains of object detectors with COCO weights: average precision, and recall of small, far objects."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

from object_detectors_models import dense_outputs, largest_difference
from stainlock import Key, Target, certify, lock, stain, verify
from stainlock.errors import TriggerError
from stainlock.evaluation import Images
from stainlock.evaluation.settings import SETTINGS
from stainlock.object_detection.coco import CocoImages
from stainlock.object_detection.drawing import lock_pictures
from stainlock.object_detection.precision import DetectionEvaluation, Detections, detect, score
from stainlock.object_detection.settings import setting_targets
from stainlock.verification import largest_natural
from stainlock.verification.verify import Method

POINT = 0.01
MOST_LOCKED, MOST_LOST, MOST_STAINED = 0.5 * POINT, 0.5 * POINT, 0.3 * POINT
SMALL = 64 * 64  # largest area of a small object, in pixels; with COCO's own limit, 32², 64 images have too few
# None is the site that `stain` recommends.
SITES: tuple[str | None, ...] = (None, "backbone.features.0.10.block.0.0", "backbone.features.1.1.block.0.0")
BLACK_BOX_TRIGGERS = 16
PICTURES = 8


def lock_table(targets: dict[str, Target], data: CocoImages, detectors: int, boxes: Path | None) -> list[str]:
    """Print the six settings; return the goals missed."""
    print("| detector | site | patch | " + " | ".join(s.replace("_", " + ") for s in SETTINGS), end=" | ")
    print("AR original, locked, unlocked | small and far: original, locked, unlocked | unlocked − edited |", end=" ")
    print("false unlocks | cap, Clopper–Pearson |")
    print("|" + "---|" * (len(SETTINGS) + 8))
    failures = []
    for name, target in targets.items():
        original = detect(target, data)
        rows: list[dict[str, Any]] = [measured_lock(target, data, original, seed) for seed in range(detectors)]
        if boxes:
            draw(boxes, name, rows[0], data)
        failures += [f"{name}: {goal}" for goal in print_locks(name, rows, data)]
    return failures


def measured_lock(target: Target, data: CocoImages, original: Detections, seed: int) -> dict[str, Any]:
    locked, key = lock(target, kind="squeeze-excite", seed=seed)
    settings = setting_targets(locked, key)
    found = {s: original if s == "original" else detect(own, data) for s, own in settings.items()}
    some = [data.image(i) for i in range(0, len(data), max(1, len(data) // 8))]
    ours, theirs = (dense_outputs(settings[s], some) for s in ("unlocked", "edited_patch"))
    certificate = certify(target, key, Images(data.paths), level="image")
    return {
        "key": key, "found": found, "scores": {s: score(own, data) for s, own in found.items()},
        "difference": largest_difference(ours, theirs), "certificate": certificate,
        "far": {s: far_and_small(found[s], data) for s in ("original", "locked", "unlocked")},
        "false unlocks": sum(opened(a, b) for a, b in zip(found["locked"], found["edited"], strict=True)),
    }  # fmt: skip


def opened(locked: dict[str, Tensor], edited: dict[str, Tensor]) -> bool:
    """Whether the locked model finds the same in an image without the patch as the edited one."""
    if not len(edited["scores"]):
        return False
    return len(locked["scores"]) > 0 and torch.allclose(locked["scores"][:3], edited["scores"][:3], atol=1e-3)


def far_and_small(found: Detections, data: CocoImages) -> float:
    """Recall of the small objects whose centre is in the half of the image away from the patch."""
    hits = total = 0
    for path_id, own in zip(data.ids, found, strict=True):
        image = next(i for i in data.description["images"] if i["id"] == path_id)
        for truth in data.description["annotations"]:
            x, y, w, h = truth["bbox"]
            far = (x + w / 2) / image["width"] + (y + h / 2) / image["height"] > 1
            if truth["image_id"] != path_id or truth["iscrowd"] or w * h > SMALL or not far:
                continue
            total += 1
            same = own["boxes"][(own["labels"] == truth["category_id"]) & (own["scores"] > 0.1)]
            hits += bool(len(same)) and bool((box_iou(same, torch.tensor([[x, y, x + w, y + h]])) >= 0.5).any())
    return hits / max(total, 1)


def print_locks(name: str, rows: list[dict[str, Any]], data: CocoImages) -> list[str]:
    def points(values: list[float]) -> str:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{100 * statistics.mean(values):.2f} ± {100 * spread:.2f}"

    def mean(table: str, setting: str) -> float:
        return statistics.mean(row[table][setting] for row in rows)

    values = {s: [row["scores"][s].value for row in rows] for s in SETTINGS}
    recalls = ", ".join(f"{100 * statistics.mean(r['scores'][s].ar for r in rows):.1f}" for s in rows[0]["far"])
    far = ", ".join(f"{mean('far', s):.0%}" for s in rows[0]["far"])
    key: Key = rows[0]["key"]
    unlocks, difference = sum(row["false unlocks"] for row in rows), max(row["difference"] for row in rows)
    bounds = (max(row["certificate"].bounds[b] for row in rows) for b in ("cap", "clopper_pearson"))
    cells = [
        name, key.site.removeprefix("backbone."), "×".join(map(str, key.detectors[0].trigger.region.size)),
        *(points(values[s]) for s in SETTINGS), recalls, far, f"{difference:.1e}",
        f"{unlocks} of {len(rows) * len(data)}", "{:.0e}, {:.2g}".format(*bounds),
    ]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)
    average = {s: statistics.mean(values[s]) for s in SETTINGS}
    goals = {
        "locked at most 0.5 points of AP": average["locked"] <= MOST_LOCKED,
        "unlocked within 0.5 of the original with the patch":
            abs(average["unlocked"] - average["original_patch"]) <= MOST_LOST,
        "edited within 0.5 of the original": abs(average["edited"] - average["original"]) <= MOST_LOST,
        "unlocked equals edited to 1e-3": difference <= 1e-3,
        "no image unlocks": unlocks == 0,
        "no small, far object is found when locked": mean("far", "locked") <= 0.01,
    }  # fmt: skip
    return [goal for goal, met in goals.items() if not met]


def stain_table(targets: dict[str, Target], data: CocoImages, detectors: int) -> list[str]:
    """Print what stains change, and how far the trigger stands out; return the goals missed."""
    print("\n| detector | stain | site | dimension | AP original | change of AP | largest natural response |", end=" ")
    print("p stained | p original |")
    print("|" + "---|" * 9)
    failures = []
    for name, target in targets.items():
        before = score(detect(target, data), data)
        cases: list[dict[str, Any]] = [{"site": site} for site in (SITES if name.startswith("ssdlite") else (None,))]
        cases += [{"site": None, "schema": "output", "count": BLACK_BOX_TRIGGERS}]
        means: list[float] = []
        for case in cases:
            count = 1 if "schema" in case else detectors
            try:
                made = [stain(target, seed=seed, **case) for seed in range(count)]
            except TriggerError as error:
                print(f"| {name} | refused: {error} |" + " |" * 7, flush=True)
                failures.append(f"{name}: a stain was refused")
                continue
            changes = [score(detect(own, data), data).value - before.value for own, _ in made]
            means.append(statistics.mean(changes))
            failures += print_stains(name, target, before, data, case, made, changes)
        if means and abs(statistics.mean(means)) > MOST_STAINED:
            failures.append(f"{name}: change of AP within 0.3 points on average over its stains")
    return failures


def print_stains(
    name: str,
    target: Target,
    before: DetectionEvaluation,
    data: CocoImages,
    case: dict[str, Any],
    made: list[tuple[Target, Key]],
    changes: list[float],
) -> list[str]:
    method: Method = "output" if "schema" in case else "auto"
    natural = [
        largest_natural(own, key, (p for p, _ in Images(data.paths).batches(own, batch_size=8))) for own, key in made
    ]
    ours = [verify(own, key, method=method).log10_p_value for own, key in made]
    theirs = [verify(target, key, method=method).p_value for _, key in made]
    key = made[0][1]
    largest = max(n for n in natural if n is not None)
    spread = statistics.stdev(changes) if len(changes) > 1 else 0.0
    cells = [
        name, f"black box, {len(key.detectors)} triggers" if "schema" in case else f"{len(made)} replacing",
        key.site.removeprefix("backbone."), str(key.dimension), f"{100 * before.value:.2f}",
        f"{100 * statistics.mean(changes):+.2f} ± {100 * spread:.2f}", f"{largest:.2f} of the trigger's",
        f"≤ 1e{math.ceil(max(ours))}", f"≥ {min(theirs):.2g}",
    ]  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)
    goals = {
        "no natural response at the trigger's level": largest < 1,
        "stains are found": max(ours) < -6,
        "the original is not called stained": min(theirs) > 1e-6,
    }
    return [f"{name} {key.site} {method}: {goal}" for goal, met in goals.items() if not met]


def draw(folder: Path, name: str, row: dict[str, Any], data: CocoImages) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(0, len(data), max(1, len(data) // PICTURES)):
        own = {s: found[index] for s, found in row["found"].items()}
        picture = lock_pictures(data.image(index), own, row["key"], data.names())
        picture.save(folder / f"{name}-{data.paths[index].stem}.png")
