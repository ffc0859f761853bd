"""COCO folders: ``images/``, read at their own sizes, and ``annotations.json`` with boxes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import FileError
from stainlock.evaluation.data import chosen_indices, open_image
from stainlock.storage.files import exists
from stainlock.storage.records import parse_json
from stainlock.storage.values import check_whole, expect, shown
from stainlock.storage.weights import one_line

ANNOTATIONS, IMAGES = "annotations.json", "images"
_LONGEST, _FARTHEST = 2**30, 1e9  # limits: bytes of annotations, and coordinates in pixels


def is_coco(folder: Path) -> bool:
    return (folder / ANNOTATIONS).is_file() and (folder / IMAGES).is_dir()


@dataclass(frozen=True)
class CocoImages:
    """Image files, their ids, and COCO's description of their contents."""

    paths: list[Path]
    ids: list[int]
    description: dict[str, Any]

    @classmethod
    def from_folder(cls, folder: str | Path) -> CocoImages:
        folder = Path(folder)
        if not is_coco(folder):
            raise FileError(f"expected a COCO folder with {IMAGES}/ and {ANNOTATIONS}, got {folder}")
        description = _read_description(folder / ANNOTATIONS)
        records = description["images"]
        paths = [folder / IMAGES / record["file_name"] for record in records]
        if missing := [path for path in paths if not (exists(path) and path.is_file())]:
            raise FileError(
                f"{folder / ANNOTATIONS} names {len(missing)} missing files (such as {shown(missing[0].name)})"
                f" of {len(paths)}: put them into {IMAGES}/, or remove their entries"
            )
        return cls(paths, [record["id"] for record in records], description)

    def __len__(self) -> int:
        return len(self.paths)

    def limited(self, limit: int | None) -> CocoImages:
        """At most ``limit`` images, evenly spaced."""
        chosen = chosen_indices(len(self), limit)
        return CocoImages([self.paths[i] for i in chosen], [self.ids[i] for i in chosen], self.description)

    def image(self, index: int) -> Tensor:
        """Pixels ``(3, H, W)`` within [0, 1], at the image's own size; grey, palette and RGBA files become RGB."""
        array = np.array(open_image(self.paths[index], "RGB"), dtype=np.uint8)
        return torch.from_numpy(array).permute(2, 0, 1).float() / 255

    def check_categories(self, classes: int | None) -> None:
        """The model's labels must be COCO's category ids."""
        if classes is None:
            return
        known = Counter(a["category_id"] for a in self.description["annotations"])
        outside = sorted(c for c in known if not 1 <= c < classes)
        if outside:
            raise ValueError(
                f"expected category ids from 1 to {classes - 1}, as the model has {classes} classes with its"
                f" background, got {sum(known[c] for c in outside)} of {known.total()} boxes outside (id"
                f" {outside[-1]} for example): check {ANNOTATIONS} or the model"
            )

    def names(self) -> dict[int, str]:
        """Category names by id."""
        return {c["id"]: c["name"] for c in self.description["categories"]}


def _read_description(path: Path) -> dict[str, Any]:
    """The part of an annotation file that evaluation needs, checked; the rest is dropped."""
    try:
        if path.stat().st_size > _LONGEST:
            raise ValueError(f"it is too long, {path.stat().st_size} bytes")
        content = parse_json(path.read_bytes())
        images = [_image(record) for record in _objects(content, "images")]
        boxes = [_box(box, number) for number, box in enumerate(_objects(content, "annotations"), start=1)]
        named = (
            _objects(content, "categories") if "categories" in content else [{"id": b["category_id"]} for b in boxes]
        )
        categories = {_whole(one, "id"): str(one.get("name", one["id"])) for one in named}
    except OSError as error:
        raise FileError(f"{path} can't be read ({error.strerror})") from error
    except KeyError as error:
        raise FileError(f"{path} is not a file of COCO annotations with boxes: {shown(error)} is missing") from error
    except (ValueError, TypeError) as error:
        raise FileError(f"{path} is not a file of COCO annotations with boxes: {one_line(error)}") from error
    ids = {record["id"] for record in images}
    if not images:
        raise FileError(f"{path} lists no images: expected at least one")
    if len(ids) != len(images):
        raise FileError(f"{path} lists {len(images)} images with {len(ids)} different ids: expected one id per image")
    if len({box["id"] for box in boxes}) != len(boxes):
        raise FileError(f"{path} has annotations with the same id: expected different ids")
    if strays := [box for box in boxes if box["image_id"] not in ids]:
        raise FileError(f"{path}: annotation {strays[0]['id']} is for image {strays[0]['image_id']}, which it does not"
                        " list: fix or remove it")  # fmt: skip
    return {"info": {}, "images": images, "annotations": boxes,
            "categories": [{"id": number, "name": name} for number, name in sorted(categories.items())]}  # fmt: skip


def _objects(content: Any, name: str) -> list[dict[str, Any]]:
    found = content[name] if isinstance(content, dict) else None
    expect(isinstance(found, list) and all(isinstance(one, dict) for one in found), f"a list of objects as {name}",
           "something else")  # fmt: skip
    return list(found or ())


def _image(record: dict[str, Any]) -> dict[str, Any]:
    expect(isinstance(record["file_name"], str), "text as file_name", record["file_name"])
    return {"id": _whole(record, "id"), "file_name": record["file_name"]}


def _box(box: dict[str, Any], number: int) -> dict[str, Any]:
    """A checked annotation; ``number`` becomes its id if it has none."""
    where, sides = box.get("id", "?"), box["bbox"]
    plain = isinstance(sides, list) and len(sides) == 4 and all(type(side) in (int, float) for side in sides)
    if not plain or not all(abs(side) <= _FARTHEST for side in sides) or min(sides[2:]) < 0:
        raise ValueError(f"annotation {shown(where)} has the invalid box {shown(sides)}: fix or remove it")
    area, width, height = box.get("area", sides[2] * sides[3]), float(sides[2]), float(sides[3])
    expect(
        type(area) in (int, float) and 0 <= area <= _FARTHEST**2, f"a number as annotation {shown(where)}'s area", area
    )
    crowd = box.get("iscrowd", 0)
    expect(crowd in (0, 1), "0 or 1 as iscrowd", crowd)
    return {"id": _whole(box, "id") if "id" in box else number, "image_id": _whole(box, "image_id"),
            "category_id": _whole(box, "category_id"), "area": float(area), "iscrowd": int(crowd),
            "bbox": [float(sides[0]), float(sides[1]), width, height]}  # fmt: skip


def _whole(facts: dict[str, Any], name: str) -> int:
    """A whole number; some programs write it as text."""
    value = facts[name]
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
        value = int(value)
    check_whole(value, name, 0, 2**62)
    return int(value)
