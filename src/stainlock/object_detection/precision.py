"""Average precision and recall of an object detector, computed by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stainlock.errors import ModelError
from stainlock.network.object_detectors import Resizing, class_count
from stainlock.object_detection.coco import CocoImages
from stainlock.target import Target, evaluation_mode

Progress = Callable[[int, int], None]
Detections = list[dict[str, Tensor]]  # per image: boxes (N, 4) as x1, y1, x2, y2, scores and labels
_BATCH = 8


@dataclass(frozen=True)
class DetectionEvaluation:
    """COCO's numbers as fractions of 1: AP over IoU 0.5:0.95, AP at 0.5 and 0.75, AR with 100 boxes per image.

    ``ap_by_size`` is the AP of small (below 32² pixels), medium and large (above 96²) objects; NaN if there are none.
    """

    value: float
    images: int
    ap50: float
    ap75: float
    ar: float
    ap_by_size: tuple[float, float, float]
    metric: str = "AP"

    def numbers(self) -> dict[str, float]:
        small, medium, large = self.ap_by_size
        sizes = {"ap_small": small, "ap_medium": medium, "ap_large": large}
        return {"ap50": self.ap50, "ap75": self.ap75, "ar": self.ar, **sizes}


def evaluate_object_detector(
    target: Target, data: CocoImages, *, limit: int | None = None, progress: Progress | None = None
) -> DetectionEvaluation:
    """AP and AR of an object detector on a COCO folder; the model is left in the mode it was in."""
    load_pycocotools()  # fails before the work if it is missing
    data.check_categories(class_count(target.model))
    data = data.limited(limit)
    return score(detect(target, data, progress=progress), data)


def detect(target: Target, data: CocoImages, *, progress: Progress | None = None) -> Detections:
    """The objects found in every image, in the image's coordinates.

    If the model pads images to the largest of a batch, they run one by one, so no image depends on the others.
    """
    size = _BATCH if Resizing.of(target.model).fixed else 1
    found: Detections = []
    with evaluation_mode(target.model), torch.inference_mode():
        for start in range(0, len(data), size):
            indices = range(start, min(start + size, len(data)))
            images = [data.image(i).to(target.device, target.dtype) for i in indices]
            found += [{name: value.cpu() for name, value in own.items()} for own in _boxes(target(images), len(images))]
            if progress is not None:
                progress(len(found), len(data))
    return found


def _boxes(output: Any, count: int) -> Detections:
    fits = isinstance(output, list) and len(output) == count
    if not fits or not all(isinstance(own, dict) and {"boxes", "scores", "labels"} <= set(own) for own in output):
        raise ModelError(
            "average precision needs a list of boxes, scores and labels, one entry per image, but the model"
            f" returned {type(output).__name__}"
        )
    return list(output)


def score(found: Detections, data: CocoImages) -> DetectionEvaluation:
    """COCO's numbers for detections on these images, which may be only some of those described."""
    coco, evaluator = load_pycocotools()
    results = [row for image, own in zip(data.ids, found, strict=True) for row in _rows(image, own)]
    if not results:
        return DetectionEvaluation(0.0, len(data), 0.0, 0.0, 0.0, (0.0, 0.0, 0.0))
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth = coco()
        truth.dataset = data.description
        truth.createIndex()
        run = evaluator(truth, truth.loadRes(results), "bbox")
        run.params.imgIds = sorted(data.ids)
        run.evaluate()
        run.accumulate()
        run.summarize()
    stats: Sequence[float] = [float(n) if n >= 0 else float("nan") for n in run.stats]
    return DetectionEvaluation(stats[0], len(data), stats[1], stats[2], stats[8], (stats[3], stats[4], stats[5]))


def _rows(image: int, own: dict[str, Tensor]) -> list[dict[str, Any]]:
    boxes = own["boxes"].double()
    keep = boxes.isfinite().all(1) & own["scores"].isfinite()  # a ruined model may output anything
    corners, scores, labels = boxes[keep], own["scores"][keep].double(), own["labels"][keep]
    sides = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
    return [
        {"image_id": image, "category_id": label, "bbox": box, "score": value}
        for box, value, label in zip(sides.tolist(), scores.tolist(), labels.tolist(), strict=True)
    ]


def load_pycocotools() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ModuleNotFoundError as error:
        raise ModelError("average precision needs pycocotools: pip install stainlock[detection]") from error
    return COCO, COCOeval
