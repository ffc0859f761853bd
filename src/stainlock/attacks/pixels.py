"""A thief's images, in memory or in files; files are read only when an attack asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stainlock.evaluation import Images
from stainlock.target import Target


class Pixels:
    """Image files, indexed like a tensor of pixels ``(N, *input_shape)``."""

    def __init__(self, data: Images, target: Target) -> None:
        self.data, self.target = data, target

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, which: slice | Tensor) -> Tensor:
        chosen = self._chosen(which)
        if not len(chosen):
            return torch.empty(0, *self.target.input_shape)
        ((pixels, _),) = chosen.batches(self.target, batch_size=len(chosen))
        return pixels

    def split(self, size: int) -> Iterator[Tensor]:
        """Pixels in batches."""
        return (pixels for pixels, _ in self.data.batches(self.target, batch_size=size))

    def subset(self, which: Tensor) -> Pixels:
        return Pixels(self._chosen(which), self.target)

    def digest(self) -> str:
        return self.data.digest()

    def _chosen(self, which: slice | Tensor) -> Images:
        return self.data.subset(range(len(self))[which] if isinstance(which, slice) else which.tolist())


Pictures = Tensor | Pixels


def subset(images: Pictures, which: Tensor) -> Pictures:
    """Some of the images; files stay files."""
    return images.subset(which) if isinstance(images, Pixels) else images[which]
