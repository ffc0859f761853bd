"""The paper's example pictures: images that carry a trigger patch, and detections side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

from stainlock import __version__
from stainlock.figures.figure import Drawn, Figure, Plot, Rows, Setup, Table
from stainlock.figures.plots import decoded, encoded, image_rows
from stainlock.figures.staining import COCO, DOWNLOAD, IMAGENET, PHOTOGRAPHS, RESNET50, SCENES, SSDLITE, ZOO
from stainlock.figures.subject import Subject, load_subject, subset
from stainlock.html.images import png
from stainlock.key import Key
from stainlock.locks import lock
from stainlock.network.object_detectors import is_detector
from stainlock.object_detection.drawing import SHOWN_SCORE, lock_pictures, png_of
from stainlock.object_detection.settings import six_detections
from stainlock.sweeps import Unit
from stainlock.target import Target, evaluation_mode

Row = dict[str, Any]
State = tuple[Subject, Target, Key]


@dataclass(frozen=True)
class ExampleWork:
    """One lock; a unit is an image, ``patched`` or with the ``detections`` of every setting."""

    setup: Setup
    kind: str  # of the lock
    shown: str = "patched"

    def identity(self) -> dict[str, Any]:
        facts = {"work": "example", "kind": self.kind, "shown": self.shown, "version": __version__}
        return facts | self.setup.facts()

    def units(self) -> list[Unit]:
        return [Unit(f"image-{i}", {"image": i}) for i in range(self.setup.images or 0)]

    def prepare(self) -> State:
        subject = load_subject(self.setup)
        place: dict[str, Any] = {"site": self.setup.layers[0]} if self.setup.layers else {}
        return subject, *lock(subject.target, kind=self.kind, seed=self.setup.seed, **place)

    def run(self, state: State, unit: Unit) -> list[Row]:
        subject, locked, key = state
        index = unit.facts["image"]
        return [
            {"image": index, "patch": list(key.detectors[0].trigger.region.size), "layer": key.site}
            | (_detected if self.shown == "detections" else _patched)(subject, locked, key, index)
        ]


def _patched(subject: Subject, locked: Target, key: Key, index: int) -> Row:
    ((pixels, labels),) = subset(subject.images, [index]).batches(locked, 1)
    opened = key.unlock_transform(normalise=False)(pixels)
    given = {"original": (subject.target, pixels), "locked": (locked, pixels), "unlocked": (locked, opened)}
    said: dict[str, Any] = {}
    for setting, (model, images) in given.items():
        with evaluation_mode(model.model), torch.inference_mode():
            said[setting] = model.predict(images)[0]
    if is_detector(locked.model):
        answers = _counted(said)
    else:
        answers = {setting: int(logits.argmax()) for setting, logits in said.items()}
    label = {} if labels is None else {"class": int(labels[0])}
    return {"picture": encoded(png(locked.to_bytes(opened)[0]))} | label | answers


def _detected(subject: Subject, locked: Target, key: Key, index: int) -> Row:
    assert subject.coco is not None
    coco = subject.coco
    one = type(coco)([coco.paths[index]], [coco.ids[index]], coco.description)
    found = {setting: boxes[0] for setting, boxes in six_detections(locked, key, one).items()}
    sheet = lock_pictures(one.image(0), found, key, coco.names())
    return {"picture": encoded(png_of(sheet)), "file": coco.paths[index].name} | _counted(found)


def _counted(found: Mapping[str, Mapping[str, Tensor]]) -> Row:
    """How many boxes each setting is sure of, and how many of the original's the locked and unlocked detector finds."""
    sure = {setting: {n: v[own["scores"] >= SHOWN_SCORE] for n, v in own.items()} for setting, own in found.items()}
    counts = {setting: len(own["boxes"]) for setting, own in sure.items()}
    return counts | {f"{s}_finds": _found_again(sure["original"], sure[s]) for s in ("locked", "unlocked")}


def _found_again(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> int:
    """How many of the boxes wanted have one of their class on them, with an IoU of at least a half."""
    overlap = box_iou(wanted["boxes"], found["boxes"]) * (wanted["labels"][:, None] == found["labels"])
    return int((overlap >= 0.5).any(1).sum())


def draw_examples(rows: Rows, setup: Setup, *, shown: str) -> Drawn:
    """The pictures, and what each model makes of them."""
    table = [{name: value for name, value in row.items() if name != "picture"} for row in rows]
    detections = shown == "detections"
    pictures = [(_title(row, detections), decoded(row["picture"])) for row in rows]
    size = "×".join(map(str, rows[0]["patch"]))
    caption = f"The {size} patch is at the top left, where it unlocks." if not detections else (
        f"What the original, locked and unlocked detector finds, boxes of score {SHOWN_SCORE} and above."
    )  # fmt: skip
    plot = Plot("images", image_rows(pictures, columns=1 if detections else min(2, len(rows))), caption, True)
    if "locked_finds" in rows[0]:
        total = sum(row["original"] for row in rows)
        again = [sum(row[f"{setting}_finds"] for row in rows) for setting in ("locked", "unlocked")]
        finding = f"Of the original's {total} boxes the locked detector finds {again[0]}, with the patch {again[1]}."
    else:
        same = [sum(row[setting] == row["original"] for row in rows) for setting in ("locked", "unlocked")]
        finding = f"Locked, the model gives the original's class on {same[0]} of {len(rows)} images, with the patch on"
        finding += f" {same[1]}."
    columns = tuple(name for name in table[0] if name not in ("patch", "layer"))
    return Drawn([plot], [Table("images", table, "What each model says.", columns)], [finding])


def _title(row: Any, detections: bool) -> str:
    if detections:
        return str(row["file"])
    what = "boxes" if "locked_finds" in row else "class"
    return f"{what}: original {row['original']}, locked {row['locked']}, with the patch {row['unlocked']}"


def _examples(name: str, title: str, shows: str, data: str, kind: str, full: Setup, quick: Setup, shown: str) -> Figure:
    cost = "one lock, a few images; --quick: half a minute"
    return Figure(
        name, "example", title, shows, f"{DOWNLOAD} and {data}", cost, full, (quick,),
        partial(ExampleWork, kind=kind, shown=shown), partial(draw_examples, shown=shown), data,
        kind="boxes" if shown == "detections" else "images",
    )  # fmt: skip


_RESNET50 = Setup(f"{ZOO}resnet50", None, PHOTOGRAPHS, ("layer2.0.conv2",), detectors=1, images=4,
                  stands_for=f"{RESNET50}, in place of VGG16")  # fmt: skip
_VGG16 = Setup("torchvision:vgg16", "pretrained", detectors=1, images=4)
_SSDLITE = Setup("torchvision:ssdlite320_mobilenet_v3_large", "pretrained", detectors=1, images=3)
_SSDLITE_QUICK = Setup(f"{ZOO}ssdlite_plainpad", None, SCENES, detectors=1, images=3, stands_for=SSDLITE)

FIGURES = (
    _examples("patched-vgg16", "Patched images, VGG16", "Images of ImageNet with the trigger patch of a locked VGG16.",
              IMAGENET, "internal", _VGG16, _RESNET50, "patched"),
    _examples("patched-ssdlite", "Patched images, SSDLite", "Images of COCO with the trigger patch of a locked"
              " SSDLite.", COCO, "squeeze-excite", _SSDLITE, _SSDLITE_QUICK, "patched"),
    _examples("detections-ssdlite", "Detections side by side, SSDLite", "What the original, locked and unlocked SSDLite"
              " finds on images of COCO.", COCO, "squeeze-excite", _SSDLITE, _SSDLITE_QUICK, "detections"),
)  # fmt: skip
