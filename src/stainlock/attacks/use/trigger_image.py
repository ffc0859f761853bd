"""What happens to a picture on its way: JPEG, resizing, cropping, brightness. The model stays as it is.

For a stain the trigger image goes this way; for a lock every image, its patch included, goes it.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from stainlock.attacks.attack import Attack, Attacked, Change, NotApplicable, Strength, Subject, number
from stainlock.target import Target


def _on_images(make: Callable[[Target, float], Change]) -> Callable[[Subject, Strength], Attacked]:
    def run(subject: Subject, strength: Strength) -> Attacked:
        if len(subject.target.input_shape) != 3 or subject.target.input_shape[0] not in (1, 3):
            raise NotApplicable(f"needs images as inputs, got inputs of shape {subject.target.input_shape}")
        return Attacked(trigger=make(subject.target, number(strength)))

    return run


def _jpeg(target: Target, quality: float) -> Change:
    def change(pixels: Tensor) -> Tensor:
        return target.from_bytes(torch.stack([_compressed(image, int(quality)) for image in target.to_bytes(pixels)]))

    return change


def _compressed(levels: Tensor, quality: int) -> Tensor:
    array = levels.permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array).save(buffer, "JPEG", quality=quality)
    found = torch.from_numpy(np.array(Image.open(buffer)))
    return found[None] if found.dim() == 2 else found.permute(2, 0, 1)


def _resize(target: Target, factor: float) -> Change:
    """To another size and back, as 8-bit images are."""
    height, width = target.input_shape[1:]
    size = (max(1, round(height * factor)), max(1, round(width * factor)))

    def change(pixels: Tensor) -> Tensor:
        small = F.interpolate(pixels.float(), size, mode="bilinear", antialias=True)
        back = F.interpolate(small, (height, width), mode="bilinear", antialias=True)
        return target.from_bytes(target.to_bytes(back))

    return change


def _crop(target: Target, pixels_off: float) -> Change:
    """So many rows and columns cut off at the top and the left; the last ones repeated to keep the size."""
    n = int(pixels_off)
    return lambda pixels: F.pad(pixels[..., n:, n:], (0, n, 0, n), mode="replicate")


def _brighten(target: Target, factor: float) -> Change:
    low, high = target.bounds
    return lambda pixels: target.from_bytes(target.to_bytes((low + factor * (pixels - low)).clamp(low, high)))


BOTH = ("stain", "lock")
ATTACKS = (
    Attack("trigger-jpeg", "use", BOTH, "nothing", (95, 75, 50, 30), _on_images(_jpeg), "strength is JPEG's quality"),
    Attack("trigger-resize", "use", BOTH, "nothing", (0.5, 0.75, 0.9, 1.5), _on_images(_resize),
           "resized by the strength, and back"),
    Attack("trigger-crop", "use", BOTH, "nothing", (1, 2, 4), _on_images(_crop), "strength is in pixels"),
    Attack("trigger-brightness", "use", BOTH, "nothing", (0.8, 0.9, 1.1, 1.25), _on_images(_brighten),
           "brightness times the strength"),
)  # fmt: skip
