"""The paper's six settings of a locked object detector: original, edited and locked, without and with the patch."""

from __future__ import annotations

from stainlock.evaluation.settings import SETTINGS, within
from stainlock.key import Key
from stainlock.network.object_detectors import class_count
from stainlock.object_detection.coco import CocoImages
from stainlock.object_detection.precision import (
    DetectionEvaluation,
    Detections,
    Progress,
    detect,
    load_pycocotools,
    score,
)
from stainlock.target import Target


def setting_targets(locked: Target, key: Key) -> dict[str, Target]:
    """An object detector for each setting; for those with the patch, one that pastes it in itself."""
    models = {"original": key.original(locked), "edited": key.edited(locked), "locked": locked}
    return {
        "original": models["original"],
        "original_patch": key.unlock_object_detector(models["original"]),
        "edited": models["edited"],
        "edited_patch": key.unlock_object_detector(models["edited"]),
        "locked": locked,
        "unlocked": key.unlock_object_detector(locked),
    }


def six_detections(
    locked: Target, key: Key, data: CocoImages, *, progress: Progress | None = None
) -> dict[str, Detections]:
    """The detections of each setting on the images."""
    data.check_categories(class_count(locked.model))
    return {
        setting: detect(target, data, progress=None if progress is None else within(progress, done))
        for done, (setting, target) in enumerate(setting_targets(locked, key).items())
    }


def six_object_detector_settings(
    locked: Target, key: Key, data: CocoImages, *, limit: int | None = None, progress: Progress | None = None
) -> dict[str, DetectionEvaluation]:
    """AP and AR in each setting; the key reverts the lock, so only the locked model is needed."""
    load_pycocotools()
    data = data.limited(limit)
    found = six_detections(locked, key, data, progress=progress)
    return {setting: score(found[setting], data) for setting in SETTINGS}
