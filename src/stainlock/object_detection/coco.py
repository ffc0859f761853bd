"""COCO folders: ``images/`` and ``annotations.json`` with boxes; read whole, at the images' own sizes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import FileError
from stainlock.evaluation.data import chosen_indices, open_image

ANNOTATIONS, IMAGES = "annotations.json", "images"


def is_coco(folder: Path) -> bool:
    return (folder / ANNOTATIONS).is_file() and (folder / IMAGES).is_dir()


@dataclass(frozen=True)
class CocoImages:
    """Image files, their ids, and COCO's own description of what is on them."""

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
        paths = [folder / IMAGES / str(record["file_name"]) for record in records]
        if missing := [path for path in paths if not path.is_file()]:
            raise FileError(
                f"{folder / ANNOTATIONS} names {len(missing)} missing files ({missing[0].name}, say), of {len(paths)}:"
                f" put them into {IMAGES}/, or remove their entries"
            )
        return cls(paths, [int(record["id"]) for record in records], description)

    def __len__(self) -> int:
        return len(self.paths)

    def limited(self, limit: int | None) -> CocoImages:
        """So many images, at even distances over the whole."""
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
        known = Counter(int(a["category_id"]) for a in self.description["annotations"])
        outside = sorted(c for c in known if not 1 <= c < classes)
        if outside:
            raise ValueError(
                f"expected category ids from 1 to {classes - 1}, as the model has {classes} classes with its"
                f" background, got {sum(known[c] for c in outside)} of {known.total()} boxes outside (id"
                f" {outside[-1]}, say): check {ANNOTATIONS} or the model"
            )

    def names(self) -> dict[int, str]:
        """What the categories are called."""
        return {int(c["id"]): str(c.get("name", c["id"])) for c in self.description["categories"]}


def _read_description(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        images, boxes = content["images"], content["annotations"]
        ids = {int(record["id"]) for record in images}
        for box in boxes:
            left, top, width, height = (float(n) for n in box["bbox"])
            strays = int(box["image_id"]) not in ids
            if strays or min(width, height) < 0 or not np.isfinite([left, top, width, height]).all():
                what = f"image {box['image_id']}, which it does not list" if strays else f"a box {box['bbox']}"
                raise FileError(f"{path}: annotation {box.get('id', '?')} is of {what}: mend or remove it")
            box.setdefault("area", width * height)
            box.setdefault("iscrowd", 0)
        content.setdefault("info", {})
        content.setdefault("categories", [{"id": n} for n in sorted({int(b["category_id"]) for b in boxes})])
        if any("file_name" not in record for record in images):
            raise KeyError("file_name")
    except OSError as error:
        raise FileError(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is not COCO's annotations of boxes: {type(error).__name__} {error}") from error
    if not images:
        raise FileError(f"{path} lists no images: expected at least one")
    if len(ids) != len(images):
        raise FileError(f"{path} lists {len(images)} images with {len(ids)} different ids: expected one each")
    if [b["id"] for b in boxes if "id" in b] != list(dict.fromkeys(b["id"] for b in boxes if "id" in b)):
        raise FileError(f"{path} has annotations of the same id: expected different ones")
    for number, box in enumerate(boxes, start=1):
        box.setdefault("id", number)
    return dict(content)
