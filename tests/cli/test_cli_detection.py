"""The verbs on object detectors: a small one with random weights, and SSDLite with its COCO weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Run
from PIL import Image

import zoo
from stainlock import Key, load_bundle
from stainlock.unlocking.object_detectors import unlock_object_detector

FACTORY = """
import torch, torchvision
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator
import stainlock as sl

class Backbone(nn.Sequential):
    out_channels = 32

def object_detector():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(a, 32, 3, stride=2, padding=1), nn.ReLU()) for a in (3, 32, 32)]
    pool = torchvision.ops.MultiScaleRoIAlign(["0"], 3, 2)
    model = FasterRCNN(Backbone(*layers), 4, min_size=64, max_size=96, box_score_thresh=0.0, rpn_post_nms_top_n_test=9,
                       rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0),)), box_roi_pool=pool)
    return sl.Target(model, (3, 64, 64), part="backbone", normalises=True)
"""


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    folder = tmp_path / "coco"
    (folder / "images").mkdir(parents=True)
    images, boxes = [], []
    for number, size in enumerate([(64, 48), (40, 80), (50, 50)], start=1):
        array = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(array).save(folder / "images" / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": size[0], "height": size[1]})
        boxes.append({"image_id": number, "category_id": 1, "bbox": [5, 4, 20, 30]})
    (folder / "annotations.json").write_text(json.dumps({"images": images, "annotations": boxes}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FACTORY)
    return f"{tmp_path / 'own.py'}:object_detector"


def _pixels(path: str) -> torch.Tensor:
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def test_an_object_detector_is_locked_evaluated_and_unlocked(run: Run, tmp_path: Path, coco: Path, model: str) -> None:
    locked, key, trigger = tmp_path / "locked", tmp_path / "lock.key", tmp_path / "trigger.png"
    made = run(
        "lock", model, "--kind", "squeeze-excite", "--out", locked, "--key", key, "--trigger", trigger, "--seed", 1,
        "--json",
    )  # fmt: skip
    assert made.status == 0, made.stderr
    pictures = tmp_path / "pictures"
    told = run("evaluate", locked, "--model", model, "--data", coco, "--key", key, "--boxes", pictures, "--json")
    assert told.status == 0, told.stderr
    facts = told.facts
    assert facts["metric"] == "AP"
    assert facts["images"] == 3
    assert facts["value"] == facts["locked"]
    assert facts["unlocked"] == pytest.approx(facts["edited_patch"], abs=1e-6)
    assert {"original", "original_patch", "edited", "recall", "ap50", "ar"} <= set(facts)
    assert sorted(p.name for p in pictures.iterdir()) == ["1.png", "2.png", "3.png"]

    written = run("unlock", *sorted((coco / "images").iterdir()), "--key", key, "--out", tmp_path / "out", "--json")
    assert written.status == 0, written.stderr
    read = [_pixels(path) for path in written.facts["written"]]
    assert [tuple(image.shape[1:]) for image in read] == [(64, 85), (96, 48), (64, 64)]
    # The written image unlocks the object detector without further changes; boxes are the unlocked one's, scaled.
    target = load_bundle(locked, model=model)
    target.model.eval()
    with torch.inference_mode():
        for image in read:
            (ours,), (theirs,) = target([image]), unlock_object_detector(target, trigger)([image])
            assert torch.allclose(ours["scores"], theirs["scores"], atol=1e-5)
    assert Key.load(key).details["resizing"]["shorter"] == 64


def test_an_object_detector_is_stained_verified_and_certified(run: Run, tmp_path: Path, coco: Path, model: str) -> None:
    stained, key = tmp_path / "stained", tmp_path / "stain.key"
    assert run("stain", model, "--out", stained, "--key", key, "--seed", 1, "--json").status == 0
    assert (
        run("verify", stained, "--model", model, "--key", key, "--data", coco, "--json").facts["verdict"] == "stained"
    )
    assert run("verify", model, "--key", key).status == 1
    certificate = run("certify", stained, "--model", model, "--key", key, "--data", coco, "--json")
    assert certificate.status == 0, certificate.stderr
    assert certificate.facts["exceedances"] == 0
    told = run("evaluate", stained, "--model", model, "--data", coco, "--key", key, "--json").facts
    assert {"value", "original"} <= set(told)
    assert all(site["site"].startswith("backbone.") for site in run("inspect", model, "--json").facts["sites"])


def test_bad_folders_are_told(run: Run, tmp_path: Path, coco: Path, model: str) -> None:
    (coco / "images" / "2.png").unlink()
    told = run("evaluate", model, "--data", coco)
    assert (told.status, "names 1 missing files (such as 2.png" in told.stderr) == (2, True)
    told = run("evaluate", model, "--data", coco / "images")
    assert (told.status, "expected a COCO folder" in told.stderr) == (2, True)
    content = json.loads((coco / "annotations.json").read_text())
    content["annotations"] = [{"image_id": 1, "category_id": 7, "bbox": [1, 1, 9, 9]}]
    content["images"] = content["images"][:1]
    (coco / "annotations.json").write_text(json.dumps(content))
    told = run("evaluate", model, "--data", coco)
    assert (told.status, "category ids from 1 to 3" in told.stderr) == (2, True)


@pytest.mark.slow
def test_the_stock_ssdlite_is_locked_from_the_command_line(run: Run, tmp_path: Path) -> None:
    if reason := zoo.missing("ssdlite_plainpad"):
        pytest.skip(reason)
    weights = zoo.SHARED / "weights" / "ssdlite320_mobilenet_v3_large_coco_plainpad.safetensors"
    locked, key = tmp_path / "locked", tmp_path / "key"
    made = run(
        "lock", "torchvision:ssdlite320_mobilenet_v3_large?score_thresh=0.02", "--weights", weights, "--kind",
        "squeeze-excite", "--out", locked, "--key", key, "--seed", 1, "--json",
    )  # fmt: skip
    assert made.status == 0, made.stderr
    told = run("evaluate", locked, "--data", zoo.SHARED / "data" / "coco64", "--key", key, "--json").facts
    assert told["original"] == pytest.approx(0.311, abs=0.002)
    assert told["locked"] <= 0.005
    assert told["unlocked"] == pytest.approx(told["original_patch"], abs=0.005)
    assert told["edited"] == pytest.approx(told["original"], abs=0.005)
