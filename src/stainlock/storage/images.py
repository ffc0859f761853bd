"""Image files: the stated size is checked before decoding, and only plain formats are read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from stainlock.errors import FileError

# The formats of photographs. Pillow reads others, one of which runs an external program (EPS).
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MOST_PIXELS = 2**26  # 8192 × 8192, more than the largest photographs of ImageNet
_ROWS = 256  # rows converted at a time, to limit memory


@contextmanager
def opened_image(
    path: str | Path, what: str = "an image", formats: tuple[str, ...] = FORMATS, most: int = MOST_PIXELS
) -> Iterator[Image.Image]:
    """An opened image file, not decoded yet and small enough to be; `FileError` for whatever is wrong with it."""
    try:
        with _pillow_opens(path, formats) as image:
            if image.width * image.height > most:
                raise ValueError(f"it has {image.width}×{image.height} pixels, more than {most}")
            yield image
    except FileError:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged files
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        raise FileError(f"{path} can't be read as {what} ({reason}): replace or remove it") from error


def _pillow_opens(path: str | Path, formats: tuple[str, ...]) -> Image.Image:
    """Open with Pillow's own function: ultralytics replaces it with one that installs a package if no format fits."""
    replaced = sys.modules.get("ultralytics.utils.patches")
    opens = getattr(replaced, "_image_open", Image.open)
    opened: Image.Image = opens(path, formats=formats)
    return opened


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """An image in grey (L) or RGB, whatever it was."""
    if image.mode.startswith("I"):  # 16 bits per pixel: Pillow would clip the values instead of scaling them
        image = Image.fromarray(_eight_bits(np.asarray(image)))
    elif image.mode == "P" and "transparency" in image.info:  # otherwise Pillow warns
        image = image.convert("RGBA")
    return image.convert(mode)


def _eight_bits(levels: np.ndarray) -> np.ndarray:
    """levels/257, rounded to the nearest integer, a few rows at a time."""
    rounded = np.empty(levels.shape, np.uint8)
    for start in range(0, len(levels), _ROWS):
        rows = levels[start : start + _ROWS].astype(np.int64)
        rounded[start : start + _ROWS] = ((rows.clip(0, 65535) + 128) // 257).astype(np.uint8)
    return rounded
