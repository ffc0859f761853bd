"""The interface of data sets that evaluation, certificates and attacks read images from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from stainlock.target import Target

Progress = Callable[[int, int], None]  # images done, images in all
Batches = Iterator[tuple[Tensor, Tensor | None]]  # pixels (N, *input_shape) within bounds, labels (N,)


class Data(Protocol):
    """A data set: `Images`, `Tensors`, or anything with the same methods."""

    labels: list[int] | None

    def __len__(self) -> int: ...

    def batches(
        self, target: Target, *, batch_size: int = 32, limit: int | None = None, progress: Progress | None = None
    ) -> Batches: ...

    def digest(self) -> str: ...
