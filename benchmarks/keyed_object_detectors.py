"""Average precision of keyed object detectors on COCO images: part ``detectors`` of ``benchmarks/keyed.py``."""

from __future__ import annotations

import statistics

import zoo
from stainlock import Key, Target
from stainlock.locks.keyed import Structure, file_view, lock_keyed
from stainlock.object_detection.coco import CocoImages
from stainlock.object_detection.precision import evaluate_object_detector
from stainlock.unlocking.object_detectors import unlock_object_detector
from stainlock.unlocking.patch import Unlock


def object_detector_table(name: str, keys: int, images: int) -> None:
    """AP in points, the mean over keys. The original with the patch is the fair comparison for the unlocked model."""
    target: Target = getattr(zoo, name)()
    data = CocoImages.from_folder(zoo.SHARED / "data" / "coco64").limited(images)
    rows = [_settings(target, *lock_keyed(target, seed=seed), data) for seed in range(1, keys + 1)]
    original = 100 * evaluate_object_detector(target, data).value
    print(f"\n{name}, {len(data)} images, {keys} keys: AP of the original {original:.2f}\n")
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    means = {setting: statistics.mean(row[setting] for row in rows) for setting in rows[0]}
    print(f"| {' | '.join(f'{100 * value:.2f}' for value in means.values())} |", flush=True)


def _settings(target: Target, locked: Target, key: Key, data: CocoImages) -> dict[str, float]:
    structure = Structure.of(locked)
    assert structure is not None
    bits = key.detectors[0].vector > 0
    bits[key.seed % len(bits)] ^= True
    one_wrong = Unlock(structure.layout.draw(bits, 3), bounds=target.bounds)
    models = {
        "original with patch": key.unlock_object_detector(target), "unlocked": key.unlock_object_detector(locked),
        "locked": locked, "gates removed": file_view(locked),
        "one bit wrong": unlock_object_detector(locked, one_wrong),
    }  # fmt: skip
    return {setting: evaluate_object_detector(model, data).value for setting, model in models.items()}
