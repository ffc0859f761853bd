"""More held-out images than there are photographs: each also mirrored, and shifted by a few pixels.

A change of a tenth of a point is half a photograph in five hundred. Every view has borderline cases of its own, so that
four views of a photograph tell a mean change more precisely than one.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

VIEWS = 4
_SHIFT = 1 / 28  # of the width


def views(pixels: Tensor) -> Tensor:
    """As they are and mirrored, each in place and shifted down and to the right, edges repeated."""
    by = max(1, round(_SHIFT * pixels.shape[-1]))
    shifted = F.pad(pixels, (by, 0, by, 0), mode="replicate")[..., : pixels.shape[-2], : pixels.shape[-1]]
    return torch.cat([part for one in (pixels, shifted) for part in (one, one.flip(-1))])


def with_mirrors(folder: Path, out: Path) -> Path:
    """A COCO folder with every image of ``folder`` and its mirror image, boxes mirrored too."""
    description = json.loads((folder / "annotations.json").read_text())
    (out / "images").mkdir(parents=True)
    beyond = 1 + max(record["id"] for record in description["images"])
    annotations = 1 + max(record["id"] for record in description["annotations"])
    widths = {record["id"]: record["width"] for record in description["images"]}
    for record in copy.deepcopy(description["images"]):
        name = Path(record["file_name"]).stem
        with Image.open(folder / "images" / record["file_name"]) as image:
            for mirrored in (False, True):
                changed = ImageOps.mirror(image.convert("RGB")) if mirrored else image.convert("RGB")
                changed.save(out / "images" / f"{name}-{mirrored:d}.png", compress_level=1)
        description["images"].append(record | {"id": beyond + record["id"], "file_name": f"{name}-1.png"})
    for record in description["images"][: len(widths)]:
        record["file_name"] = f"{Path(record['file_name']).stem}-0.png"
    for record in copy.deepcopy(description["annotations"]):
        x, y, width, height = record["bbox"]
        moved = [widths[record["image_id"]] - x - width, y, width, height]
        ids = {"id": annotations + record["id"], "image_id": beyond + record["image_id"]}
        description["annotations"].append(record | ids | {"bbox": moved})
    (out / "annotations.json").write_text(json.dumps(description))
    return out
