"""Images with a trigger's pixels that are none: what its class is compared with."""

from __future__ import annotations

from torch import Tensor, nn

SAME_TO_PEOPLE = 3  # as many of the look-alikes, the first ones, show people what the image shows


def count_of(channels: int) -> int:
    """How many look-alikes an image of so many channels has."""
    return SAME_TO_PEOPLE + 2 + 4 * (min(3, channels) - 1)


def look_alikes(image: Tensor, grey: float) -> list[Tensor]:
    """Of an image ``(C, H, W)`` mirrored, paler, blurred, then upside down and recoloured; ``grey`` is mid-grey."""
    return [*_same_to_people(image, grey), *_variants(image)]


def _same_to_people(image: Tensor, grey: float) -> list[Tensor]:
    """Mirrored, half as much contrast, blurred: what an image shows naturally stays, what only a detector sees goes."""
    blurred = nn.functional.avg_pool2d(nn.functional.pad(image[None], (1, 1, 1, 1), mode="replicate"), 3, 1)[0]
    return [image.flip(-1), grey + (image - grey) / 2, blurred]


def _variants(image: Tensor) -> list[Tensor]:
    """Other mirrored and recoloured copies: what has the trigger's pixels and is none."""
    mirrored = [image, image.flip(-2), image.flip((-1, -2)), image.flip(-1)]
    recoloured = [m.roll(shift, 0) for m in mirrored for shift in range(1, min(3, image.shape[0]))]
    return [*mirrored[1:3], *recoloured]
