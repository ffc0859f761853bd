"""Changes to pictures in transmission: JPEG, resizing, cropping, brightness, rounded to 8 bits as in practice."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from stainlock.target import Target

Change = Callable[[Tensor], Tensor]  # takes and returns pixels (N, *input_shape) within the target's bounds


def shows_pictures(target: Target) -> bool:
    """Whether the model's inputs can be stored as pictures, with one channel or three."""
    return len(target.input_shape) == 3 and target.input_shape[0] in (1, 3)


def jpeg(target: Target, quality: float) -> Change:
    def change(pixels: Tensor) -> Tensor:
        return target.from_bytes(torch.stack([_compressed(image, int(quality)) for image in target.to_bytes(pixels)]))

    return change


def _compressed(levels: Tensor, quality: int) -> Tensor:
    array = levels.permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array).save(buffer, "JPEG", quality=quality)
    found = torch.from_numpy(np.array(Image.open(buffer)))
    return found[None] if found.dim() == 2 else found.permute(2, 0, 1)


def resize(target: Target, factor: float) -> Change:
    """Resize by a factor and back, as 8-bit images."""

    def change(pixels: Tensor) -> Tensor:
        return target.from_bytes(target.to_bytes(resized(pixels.float(), factor)))

    return change


def resized(pixels: Tensor, factor: float) -> Tensor:
    """Resize by a factor and back, without rounding."""
    height, width = pixels.shape[-2:]
    size = (max(1, round(height * factor)), max(1, round(width * factor)))
    small = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    return F.interpolate(small, (height, width), mode="bilinear", antialias=True)


def crop(target: Target, pixels_off: float) -> Change:
    """Cut this many rows and columns off at the top and left; the last ones are repeated to keep the size."""
    n = int(pixels_off)
    return lambda pixels: F.pad(pixels[..., n:, n:], (0, n, 0, n), mode="replicate")


def brighten(target: Target, factor: float) -> Change:
    low, high = target.bounds
    return lambda pixels: target.from_bytes(target.to_bytes((low + factor * (pixels - low)).clamp(low, high)))


def usual_changes(target: Target) -> dict[str, Change]:
    """What services do to pictures, by name: the changes that robust triggers are made and tested for."""
    changes: dict[str, Change] = {f"JPEG {quality}": jpeg(target, quality) for quality in (95, 75, 50)}
    changes |= {f"resized by {factor}": resize(target, factor) for factor in (0.9, 1.15)}
    changes |= {f"cropped by {off}": crop(target, off) for off in (1, 3)}
    smaller, coarser = resize(target, 0.9), jpeg(target, 75)
    changes["resized by 0.9, JPEG 75"] = lambda pixels: coarser(smaller(pixels))
    return changes
