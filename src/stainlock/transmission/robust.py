"""Expectation over transformations: the objective of a search for triggers that survive what services do to pictures.

    maximise  E r(v·φ(c(x)))  over changes c: JPEG at 50 to 95, another size and back, a shift of a few pixels
    subject to  r(v·φ(l(x))) ≤ 0.4 r(v·φ(x))  for look-alikes l

One change is drawn per step; the search's momentum averages over them. A trigger that survives blur or loss of
contrast tends to excite its detector when mirrored or pale, too, and would then not count in a black-box verification.
So every fourth step lowers the response to a look-alike, for the images whose look-alike responds too strongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.target import Region, Target
from stainlock.transmission.changes import resized, shows_pictures
from stainlock.transmission.jpeg import soft_jpeg
from stainlock.transmission.look_alikes import SAME_TO_PEOPLE, look_alikes

_QUALITIES = (50, 95)
_SCALES = (0.85, 1.25)
_FARTHEST = 4  # largest shift, in pixels
# The probability of each change, drawn independently.
_COMPRESSED, _RESIZED, _SHIFTED = 0.75, 0.5, 0.5
# In every cycle of this many steps, one lowers the response to a look-alike and one raises that to the picture itself.
_CYCLE, _STEP_BACK, _UNCHANGED = 4, 3, 1
_MIRRORED, _PALER = 0, 1  # indices of look-alikes
_TOO_ALIKE = 0.4  # as a fraction of the trigger's response


@dataclass
class Robust:
    """The objective of one search; ``maps`` are a detector's responses to its own image, at every position."""

    target: Target
    region: Region  # the part of the picture that is optimised; mid-grey around it
    generator: torch.Generator
    repels: bool  # keeps look-alikes from exciting the detector; only black-box verification needs it

    def __post_init__(self) -> None:
        if not shows_pictures(self.target):
            raise ValueError(f"expected pictures as inputs for robust triggers, got shape {self.target.input_shape}")

    def value(
        self, step: int, pixels: Tensor, maps: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """What to increase in this step, for each image."""
        if self.repels and step % _CYCLE == _STEP_BACK:
            with torch.no_grad():
                enough = _TOO_ALIKE * read(maps(pixels))
            return -(maps(self._look_alike(pixels)).flatten(1).amax(1) - enough).clamp(min=0)
        if step % _CYCLE == _UNCHANGED:
            return read(maps(pixels))
        changed, moved = self._changed(pixels)
        found = maps(changed)
        return found.flatten(1).amax(1) if moved else read(found)

    def _changed(self, pixels: Tensor) -> tuple[Tensor, bool]:
        """The pictures after a change, and whether it moved them: then the response at any position counts."""
        chances = torch.rand(3, generator=self.generator).tolist()
        whole = self._levels(pixels)
        if chances[0] < _RESIZED:
            whole = resized(whole, self._between(*_SCALES))
        moved = chances[1] < _SHIFTED
        if moved:
            down, right = (int(self._between(-_FARTHEST, _FARTHEST + 1) // 1) for _ in range(2))
            whole = F.pad(whole, (_FARTHEST,) * 4, mode="replicate").roll((-down, -right), (-2, -1))
            whole = whole[..., _FARTHEST:-_FARTHEST, _FARTHEST:-_FARTHEST]
        if chances[2] < _COMPRESSED:
            whole = soft_jpeg(whole, round(self._between(*_QUALITIES)))
        return self._pixels(whole), moved

    def _look_alike(self, pixels: Tensor) -> Tensor:
        """With probability ½ the paler ones, which respond most; otherwise mirrored ones or one of the others."""
        images = [look_alikes(image, 127.5) for image in self._levels(pixels)]
        which = (_PALER, _PALER, _MIRRORED, int(self._between(SAME_TO_PEOPLE, len(images[0]))))[
            int(self._between(0, 4))
        ]
        return self._pixels(torch.stack([own[which] for own in images]))

    def _between(self, low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=self.generator))

    def _levels(self, pixels: Tensor) -> Tensor:
        """Whole pictures in [0, 255]: the optimised part, with mid-grey around it."""
        low, high = self.target.bounds
        (top, left), (rows, columns) = self.region.start, self.region.size
        height, width = self.target.input_shape[1:]
        around = (left, width - left - columns, top, height - top - rows)
        return F.pad((pixels - low) * (255 / (high - low)), around, value=128.0)

    def _pixels(self, levels: Tensor) -> Tensor:
        low, high = self.target.bounds
        return low + self.region.cut(levels) * ((high - low) / 255)
