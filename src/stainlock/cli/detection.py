"""`evaluate` and `unlock` for object detectors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.key import Key
    from stainlock.object_detection.coco import CocoImages
    from stainlock.object_detection.precision import DetectionEvaluation, Detections
    from stainlock.target import Target
    from stainlock.unlocking.patch_file import Patch

_PICTURES = 12  # most pictures that --boxes draws, evenly spaced over the images


def evaluate_detections(
    report: Report, target: Target, key: Key | None, folder: Path, *, limit: int | None, boxes: Path | None
) -> None:
    """AP and AR on a COCO folder: with a lock's key in the six settings, with a stain's key also of the original."""
    from stainlock.network.object_detectors import class_count
    from stainlock.object_detection.coco import CocoImages
    from stainlock.object_detection.precision import detect, load_pycocotools, score
    from stainlock.object_detection.settings import six_detections

    data = CocoImages.from_folder(folder).limited(limit)
    load_pycocotools()
    locked = key is not None and key.kind == "lock"
    with Outputs([boxes] if boxes else []) as outputs:
        if key is not None and locked:
            with report.progress("evaluating six settings") as progress:
                found = six_detections(target, key, data, progress=progress)
            given = "locked"
        else:
            data.check_categories(class_count(target.model))
            with report.progress("evaluating") as progress:
                found = {"model": detect(target, data, progress=progress)}
            given = "model"
            if key is not None:
                original = key.original(target)
                with report.progress("evaluating the original") as progress:
                    found = {"original": detect(original, data, progress=progress), **found}
        results = {setting: score(own, data) for setting, own in found.items()}
        if boxes:
            _draw(outputs.folder(boxes, secret=locked), found, data, key if locked else None)
            outputs.commit()
    facts, lines = _told(results, given, str(boxes) if boxes else None)
    report.result(facts, *lines)


def _told(
    results: Mapping[str, DetectionEvaluation], given: str, boxes: str | None
) -> tuple[dict[str, Any], list[str]]:
    own = results[given]
    facts: dict[str, Any] = {"metric": own.metric, "value": own.value, "images": own.images, **own.numbers()}
    facts |= {setting: result.value for setting, result in results.items() if setting != "model"}
    if len(results) > 1:
        facts["recall"] = {setting: result.ar for setting, result in results.items()}
    names = {setting: setting.replace("_", " + ") if setting != "model" else "as it is" for setting in results}
    lines = [
        f"{names[s]:17} AP {100 * r.value:5.2f}, AP50 {100 * r.ap50:5.2f}, AR {100 * r.ar:5.2f}"
        for s, r in results.items()
    ]
    if boxes:
        facts["boxes"] = boxes
        lines.append(f"boxes drawn in {boxes}")
    return facts, [*lines, f"on {own.images} images"]


def _draw(folder: Path, found: Mapping[str, Detections], data: CocoImages, key: Key | None) -> None:
    from stainlock.evaluation.data import chosen_indices
    from stainlock.object_detection.drawing import lock_pictures, png_of, side_by_side
    from stainlock.storage.durable import write_file

    names = data.names()
    for index in chosen_indices(len(data), min(_PICTURES, len(data))):
        image, own = data.image(index), {setting: boxes[index] for setting, boxes in found.items()}
        picture = lock_pictures(image, own, key, names) if key else side_by_side(image, own, names=names)
        write_file(folder / f"{data.paths[index].stem}.png", png_of(picture), secret=key is not None)


def unlock_images(report: Report, patch: Patch, inputs: tuple[Path, ...], outputs: Outputs, out: Path) -> None:
    """Write images with the patch in their corner, at a size that the object detector's transform leaves as it is.

    Boxes are then in the coordinates of the written images: divide them by ``scales``.
    """
    from stainlock.evaluation.data import open_image, read_for_object_detector
    from stainlock.html.images import png
    from stainlock.network.object_detectors import Resizing
    from stainlock.storage.durable import write_file

    resizing = Resizing.from_facts(patch.resizing)
    folder = outputs.folder(out, secret=True)  # the patch is in every image
    scales = []
    for path in inputs:
        levels, whole = read_for_object_detector(path, resizing), open_image(path, "RGB")
        rows, columns = patch.levels.shape[1:]
        if levels.shape[1] < rows or levels.shape[2] < columns:
            raise ValueError(
                f"expected images of at least the patch's {rows}×{columns} pixels at the object detector's own size,"
                f" got {path} of {levels.shape[1]}×{levels.shape[2]}: use less elongated ones"
            )
        write_file(folder / f"{path.stem}.png", png(patch.paste(levels)), secret=True)
        scales.append([levels.shape[2] / whole.width, levels.shape[1] / whole.height])
    outputs.commit()
    written = [str(out / f"{path.stem}.png") for path in inputs]
    report.result({"written": written, "scales": scales}, *written)
    report.remark("boxes are in the coordinates of these images: divide x and y by the scales that --json prints")
