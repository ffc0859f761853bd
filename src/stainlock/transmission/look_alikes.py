"""Look-alikes: images made from a trigger's pixels that are not triggers, to compare the trigger's class with."""

from __future__ import annotations

from torch import Tensor, nn

SAME_TO_PEOPLE = 3  # number of look-alikes, the first ones, that show people the same as the image


def count_of(channels: int) -> int:
    """The number of look-alikes of an image with this many channels."""
    return SAME_TO_PEOPLE + 2 + 4 * (min(3, channels) - 1)


def look_alikes(image: Tensor, grey: float) -> list[Tensor]:
    """The image ``(C, H, W)`` mirrored, paler, blurred, then upside down and recoloured; ``grey`` is mid-grey."""
    return [*_same_to_people(image, grey), *_variants(image)]


def _same_to_people(image: Tensor, grey: float) -> list[Tensor]:
    """Mirrored, half the contrast, blurred: what an image naturally shows stays, what only a detector sees is lost."""
    blurred = nn.functional.avg_pool2d(nn.functional.pad(image[None], (1, 1, 1, 1), mode="replicate"), 3, 1)[0]
    return [image.flip(-1), grey + (image - grey) / 2, blurred]


def _variants(image: Tensor) -> list[Tensor]:
    """Other mirrored copies, and recoloured ones: the trigger's pixels, but no longer a trigger."""
    mirrored = [image, image.flip(-2), image.flip((-1, -2)), image.flip(-1)]
    recoloured = [m.roll(shift, 0) for m in mirrored for shift in range(1, min(3, image.shape[0]))]
    return [*mirrored[1:3], *recoloured]
