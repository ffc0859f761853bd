"""Pictures of boxes: one image under several settings, side by side."""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from stainlock.facts import resizing_of
from stainlock.key import Key

SHOWN_SCORE = 0.4  # boxes with lower scores are not drawn, as is usual
_HEIGHT = 360  # pixels of a panel
_TITLE, _GAP = 26, 8
_GOLDEN = 0.618  # of the colour wheel between consecutive classes, so neighbours differ


def side_by_side(
    image: Tensor,
    panels: Mapping[str, Mapping[str, Tensor]],
    *,
    names: Mapping[int, str] | None = None,
    least_score: float = SHOWN_SCORE,
    patches: Mapping[str, Image.Image] | None = None,
) -> Image.Image:
    """The image ``(3, H, W)`` once per panel, with boxes, scores and classes, and a title above.

    ``patches`` are shown at the top left of the panels with these titles.
    """
    photograph = Image.fromarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy())
    scale = _HEIGHT / photograph.height
    size = (max(1, round(photograph.width * scale)), _HEIGHT)
    width = len(panels) * (size[0] + _GAP) - _GAP
    sheet = Image.new("RGB", (width, _HEIGHT + _TITLE), "white")
    for column, (title, found) in enumerate(panels.items()):
        panel = photograph.resize(size)
        if patches and title in patches:
            own = patches[title]
            panel.paste(own.resize((max(1, round(own.width * scale)), max(1, round(own.height * scale)))), (0, 0))
        keep = found["scores"] >= least_score
        _draw(panel, found["boxes"][keep] * scale, found["labels"][keep], found["scores"][keep], names or {})
        left = column * (size[0] + _GAP)
        sheet.paste(panel, (left, _TITLE))
        said = f"{title}: {int(keep.sum())} boxes" if int(keep.sum()) != 1 else f"{title}: 1 box"
        ImageDraw.Draw(sheet).text((left + 2, 4), said, fill="black", font=ImageFont.load_default(15))
    return sheet


def _draw(panel: Image.Image, boxes: Tensor, labels: Tensor, scores: Tensor, names: Mapping[int, str]) -> None:
    pen, font = ImageDraw.Draw(panel), ImageFont.load_default(12)
    for corners, label, score in reversed(list(zip(boxes.tolist(), labels.tolist(), scores.tolist(), strict=True))):
        if not all(map(math.isfinite, corners)):
            continue
        left, top = corners[:2]
        right, bottom = max(corners[2], left), max(corners[3], top)
        colour = _colour(label)
        pen.rectangle((left, top, right, bottom), outline=colour, width=2)
        text = f"{names.get(label, label)} {score:.2f}"
        spot = pen.textbbox((max(0, left) + 2, max(0, top - 14)), text, font=font)
        pen.rectangle((spot[0] - 2, spot[1] - 1, spot[2] + 2, spot[3] + 1), fill=colour)
        pen.text((max(0, left) + 2, max(0, top - 14)), text, fill="black", font=font)


def _colour(label: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hls_to_rgb(label * _GOLDEN % 1, 0.6, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def patch_on(image: Tensor, key: Key) -> Image.Image:
    """The key's patch, scaled to the image: the object detector resizes the image before the patch is pasted in."""
    levels = key.detectors[0].trigger.levels
    resizing = resizing_of(key)
    assert resizing is not None
    rows, columns = resizing.size(*image.shape[-2:])
    size = (levels.shape[2] * image.shape[2] / columns, levels.shape[1] * image.shape[1] / rows)
    picture = Image.fromarray(np.ascontiguousarray(levels.permute(1, 2, 0).numpy()))
    return picture.resize((max(1, round(size[0])), max(1, round(size[1]))), Image.Resampling.NEAREST)


def png_of(picture: Image.Image) -> bytes:
    content = io.BytesIO()
    picture.save(content, format="PNG")
    return content.getvalue()


def lock_pictures(
    image: Tensor, settings: Mapping[str, Mapping[str, Tensor]], key: Key, names: Mapping[int, str] | None = None,
    shown: Sequence[str] = ("original", "locked", "unlocked"), least_score: float = SHOWN_SCORE,
) -> Image.Image:  # fmt: skip
    """One image with the boxes of the original, locked and unlocked object detectors."""
    patch = patch_on(image, key)
    patches = {s: patch for s in shown if s == "unlocked" or s.endswith("_patch")}
    return side_by_side(image, {s: settings[s] for s in shown}, names=names, least_score=least_score, patches=patches)
