"""COCO folders, average precision, and pictures of boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from stainlock import FileError, ModelError, Target
from stainlock.evaluation.data import Images
from stainlock.object_detection.coco import CocoImages
from stainlock.object_detection.drawing import png_of, side_by_side
from stainlock.object_detection.precision import evaluate_object_detector, score
from stainlock.target import evaluation_mode


def describe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Three images, RGB, grey and RGBA, with two boxes each."""
    (folder / "images").mkdir(parents=True)
    images = []
    for number, (mode, size) in enumerate([("RGB", (64, 48)), ("L", (40, 80)), ("RGBA", (50, 50))], start=1):
        array = np.random.default_rng(number).integers(0, 255, (size[1], size[0]), dtype=np.uint8)
        Image.fromarray(array).convert(mode).save(folder / "images" / f"{number}.png")
        images.append({"id": 10 * number, "file_name": f"{number}.png", "width": size[0], "height": size[1]})
    boxes = [
        {"image_id": image["id"], "category_id": category, "bbox": [5 * category, 4, 20, 30]}
        for image in images
        for category in (1, 2)
    ]
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    content = {"images": images, "annotations": boxes, "categories": categories} | changes
    (folder / "annotations.json").write_text(json.dumps(content))
    return content


def found(data: CocoImages, shift: float = 0.0) -> list[dict[str, torch.Tensor]]:
    """The annotated boxes as an object detector would return them."""
    results = []
    for image in data.ids:
        own = [b for b in data.description["annotations"] if b["image_id"] == image]
        corners = [[x + shift, y, x + w + shift, y + h] for x, y, w, h in (b["bbox"] for b in own)]
        labels = torch.tensor([b["category_id"] for b in own])
        results.append({"boxes": torch.tensor(corners), "scores": torch.ones(len(own)), "labels": labels})
    return results


def test_perfect_boxes_have_precision_one_and_shifted_ones_less(tmp_path: Path) -> None:
    describe(tmp_path / "coco")
    data = CocoImages.from_folder(tmp_path / "coco")
    perfect, shifted = score(found(data), data), score(found(data, shift=5), data)
    assert (perfect.value, perfect.ar, perfect.images) == (pytest.approx(1), pytest.approx(1), 3)
    assert 0 < shifted.value < 0.5
    assert shifted.ap50 == pytest.approx(1)  # IoU 15/25
    nothing = [{"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.long)}] * 3
    assert score(nothing, data).value == 0
    ruined = [{**own, "boxes": own["boxes"] * float("nan")} for own in found(data)]
    assert score(ruined, data).value == 0


def test_some_of_the_images_are_scored_by_themselves(tmp_path: Path) -> None:
    describe(tmp_path / "coco")
    data = CocoImages.from_folder(tmp_path / "coco").limited(2)
    assert len(data) == 2
    assert score(found(data), data).value == pytest.approx(1)


def test_grey_and_rgba_files_become_rgb(tmp_path: Path) -> None:
    describe(tmp_path / "coco")
    data = CocoImages.from_folder(tmp_path / "coco")
    assert [tuple(data.image(i).shape) for i in range(3)] == [(3, 48, 64), (3, 80, 40), (3, 50, 50)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"images": [{"id": 1, "file_name": "missing.jpg"}], "annotations": []},
            r"1 missing files \(such as missing.jpg",
        ),
        ({"images": []}, "lists no images|which it does not list"),
        ({"annotations": [{"image_id": 99, "category_id": 1, "bbox": [0, 0, 1, 1]}]}, "image 99, which it does not"),
        ({"annotations": [{"image_id": 10, "category_id": 1, "bbox": [0, 0, -1, 1]}]}, "fix or remove"),
        ({"annotations": [{"image_id": 10, "category_id": 1}]}, "'bbox' is missing"),
        ({"images": [{"id": 10, "file_name": "1.png"}] * 2, "annotations": []}, "different ids"),
    ],
)
def test_annotations_that_dont_fit_are_told(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    describe(tmp_path / "coco", **changes)
    with pytest.raises(FileError, match=message):
        CocoImages.from_folder(tmp_path / "coco")


def test_damaged_annotations_and_other_folders_are_told(tmp_path: Path) -> None:
    describe(tmp_path / "coco")
    (tmp_path / "coco" / "annotations.json").write_text("{")
    with pytest.raises(FileError, match="not a file of COCO annotations"):
        CocoImages.from_folder(tmp_path / "coco")
    with pytest.raises(FileError, match="expected a COCO folder"):
        CocoImages.from_folder(tmp_path)


def test_categories_that_the_model_does_not_have_are_told(tmp_path: Path) -> None:
    describe(tmp_path / "coco", annotations=[{"image_id": 10, "category_id": 91, "bbox": [0, 0, 9, 9]}])
    data = CocoImages.from_folder(tmp_path / "coco")
    with pytest.raises(ValueError, match=r"from 1 to 90.*1 of 1 boxes outside \(id 91"):
        evaluate_object_detector(models.real("ssdlite_plainpad"), data)


def test_a_classifier_has_no_average_precision(tmp_path: Path) -> None:
    describe(tmp_path / "coco")
    with pytest.raises(ModelError, match="expected an object detector"):
        evaluate_object_detector(models.conv_net(), CocoImages.from_folder(tmp_path / "coco"))


def test_certificates_see_what_an_object_detectors_backbone_sees() -> None:
    """A folder's images reach an object detector's site as its transform makes them, not cropped as a classifier's."""
    target: Target = models.real("ssdlite_plainpad")
    folder = zoo.SHARED / "data" / "coco64"
    pixels, _ = next(Images.from_folder(folder).batches(target, batch_size=2, limit=2))
    data = CocoImages.from_folder(folder)
    index = data.paths.index(Images.from_folder(folder).paths[0])
    model: Any = target.model
    with evaluation_mode(model):
        batch, _ = model.transform([data.image(index)])
    assert float((target.normalise(pixels[:1]) - batch.tensors).abs().max()) <= 1 / 255 + 1e-5  # rounded to 8 bits


def test_boxes_are_drawn_side_by_side() -> None:
    image = torch.zeros(3, 90, 120)
    box = {"boxes": torch.tensor([[20.0, 30.0, 100.0, 80.0]]), "scores": torch.ones(1), "labels": torch.tensor([3])}
    none = {name: value[:0] for name, value in box.items()}
    bad = {**box, "boxes": box["boxes"] * float("nan")}
    sheet = side_by_side(image, {"original": box, "locked": none, "ruined": bad}, names={3: "car"})
    left, middle, right = (np.array(sheet)[30:, a : a + 470] for a in (0, 490, 980))
    assert [panel.any() for panel in (left, middle, right)] == [True, False, False]
    assert png_of(sheet).startswith(b"\x89PNG")
