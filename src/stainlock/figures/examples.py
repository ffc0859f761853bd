"""The paper's example pictures: images with a trigger patch, and detections side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import box_iou

from stainlock import __version__
from stainlock.figures.figure import Drawn, Figure, Plot, Rows, Setup, Table
from stainlock.figures.paper import PAPER
from stainlock.figures.plots import decoded, encoded, image_rows
from stainlock.figures.stand_ins import COCO, DOWNLOAD, IMAGENET, RESNET50, SSDLITE
from stainlock.figures.subject import Subject, class_namer, load_subject, subset
from stainlock.html.images import png
from stainlock.key import Key
from stainlock.locks import lock
from stainlock.network.object_detectors import is_object_detector
from stainlock.object_detection.drawing import SHOWN_SCORE, lock_pictures, png_of
from stainlock.object_detection.settings import six_detections
from stainlock.sweeps import Unit
from stainlock.target import Target, evaluation_mode

Row = dict[str, Any]
State = tuple[Subject, Target, Key]
_CLASSES = ("class", "original", "locked", "unlocked")  # columns with class indices


@dataclass(frozen=True)
class ExampleWork:
    """One lock. A unit is one image, shown ``patched`` or with the ``detections`` in every setting."""

    setup: Setup
    kind: str  # kind of lock
    shown: str = "patched"

    def identity(self) -> dict[str, Any]:
        facts = {"work": "example", "kind": self.kind, "shown": self.shown, "version": __version__}
        return facts | self.setup.identity()

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
    ((pixels, labels),) = subset(subject.images, [index]).batches(locked, batch_size=1)
    opened = key.unlock_transform(normalise=False)(pixels)
    given = {"original": (subject.target, pixels), "locked": (locked, pixels), "unlocked": (locked, opened)}
    said: dict[str, Any] = {}
    for setting, (model, images) in given.items():
        with evaluation_mode(model.model), torch.inference_mode():
            said[setting] = model.predict(images)[0]
    if is_object_detector(locked.model):
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
    """Number of confident boxes in each setting, and how many of the original's are found locked and unlocked."""
    sure = {setting: {n: v[own["scores"] >= SHOWN_SCORE] for n, v in own.items()} for setting, own in found.items()}
    counts = {setting: len(own["boxes"]) for setting, own in sure.items()}
    return counts | {f"{s}_finds": _found_again(sure["original"], sure[s]) for s in ("locked", "unlocked")}


def _found_again(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> int:
    """How many of the wanted boxes overlap a found box of the same class with IoU at least 0.5."""
    overlap = box_iou(wanted["boxes"], found["boxes"]) * (wanted["labels"][:, None] == found["labels"])
    return int((overlap >= 0.5).any(1).sum())


def draw_examples(rows: Rows, setup: Setup, *, shown: str) -> Drawn:
    """The pictures, and each model's answers."""
    detections, counted = shown == "detections", "locked_finds" in rows[0]
    table = [_without_picture(row) if counted else _named(_without_picture(row), setup) for row in rows]
    pictures = [(_title(row, detections), decoded(given["picture"])) for row, given in zip(table, rows, strict=True)]
    size = "×".join(map(str, rows[0]["patch"]))
    caption = f"The {size} patch that unlocks the model is in the top left corner." if not detections else (
        f"Boxes of score {SHOWN_SCORE} and above, found by the original, locked and unlocked object detector."
    )  # fmt: skip
    plot = Plot("images", image_rows(pictures, columns=1 if detections else min(2, len(rows))), caption, True)
    if counted:
        total = sum(row["original"] for row in rows)
        again = [sum(row[f"{setting}_finds"] for row in rows) for setting in ("locked", "unlocked")]
        finding = f"Of the original's {total} boxes, the locked model finds {again[0]} and the unlocked one {again[1]}."
    else:
        same = [sum(row[setting] == row["original"] for row in rows) for setting in ("locked", "unlocked")]
        finding = f"The locked model predicts the original's class on {same[0]} of {len(rows)} images, the unlocked one"
        finding += f" on {same[1]}."
    columns = tuple(name for name in table[0] if name not in ("patch", "layer") and not name.endswith("_index"))
    what = "Number of boxes." if counted else "Predicted classes."
    return Drawn([plot], [Table("images", table, what, columns)], [finding])


def _without_picture(row: Mapping[str, Any]) -> Row:
    return {name: value for name, value in row.items() if name != "picture"}


def _named(row: Row, setup: Setup) -> Row:
    """Class names in place of indices, which move to columns of their own."""
    name = class_namer(setup)
    classes = {column: row[column] for column in _CLASSES if column in row}
    named = {column: name(index) for column, index in classes.items()}
    return row | named | {f"{column}_index": index for column, index in classes.items()}


def _title(row: Row, detections: bool) -> str:
    if detections:
        return str(row["file"])
    what = " boxes" if "locked_finds" in row else ""
    answers = {"original": row["original"], "locked": row["locked"], "with the patch": row["unlocked"]}
    return "\n".join(f"{setting}: {answer}{what}" for setting, answer in answers.items())


def _examples(name: str, title: str, shows: str, data: str, kind: str, full: Setup, quick: Setup, shown: str) -> Figure:
    cost = "one lock, a few images; --quick: half a minute"
    return Figure(
        name, "example", title, shows, f"{DOWNLOAD} and {data}", cost, full, (quick,),
        partial(ExampleWork, kind=kind, shown=shown), partial(draw_examples, shown=shown), PAPER[name], data,
        kind="boxes" if shown == "detections" else "images",
    )  # fmt: skip


_VGG16 = Setup("torchvision:vgg16", "pretrained", detectors=1, images=4, name="VGG16", classes="imagenet")
_RESNET50_QUICK = replace(RESNET50, layers=("layer2.0.conv2",), detectors=1, images=4,
                          stands_for=f"{RESNET50.stands_for}, instead of VGG16")  # fmt: skip
_SSDLITE = Setup("torchvision:ssdlite320_mobilenet_v3_large", "pretrained", detectors=1, images=3, name="SSDLite")
_SSDLITE_QUICK = replace(SSDLITE, detectors=1, images=3)

FIGURES = (
    _examples("patched-vgg16", "Patched images", "ImageNet photographs with the trigger patch of a locked classifier.",
              IMAGENET, "internal", _VGG16, _RESNET50_QUICK, "patched"),
    _examples("patched-ssdlite", "Patched images", "COCO photographs with the trigger patch of a locked object"
              " detector.", COCO, "squeeze-excite", _SSDLITE, _SSDLITE_QUICK, "patched"),
    _examples("detections-ssdlite", "Detections side by side", "Objects that the original, locked and unlocked object"
              " detector finds in COCO photographs.", COCO, "squeeze-excite", _SSDLITE, _SSDLITE_QUICK, "detections"),
)  # fmt: skip
