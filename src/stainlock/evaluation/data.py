"""Data to evaluate on: image files as ``--data DIR`` takes them, and tensors in memory."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from stainlock.data import Batches, Progress
from stainlock.errors import FileError, ModelError
from stainlock.evaluation.layouts import find_images
from stainlock.models.libraries import resize_filter
from stainlock.network.object_detectors import Resizing, is_object_detector
from stainlock.storage.images import in_mode, opened_image
from stainlock.target import Target

CROP_FRACTION = 224 / 256  # how much of the shorter side ImageNet's centre crop keeps
SMALL = 64  # inputs below this many pixels (CIFAR, MNIST) are not cropped
BATCHES_AHEAD = 2  # decoded while the model runs


class Images:
    """Image files with or without labels, read as RGB, or as grey if the target has one input channel.

    >>> photographs = sl.Images.from_folder("photographs")
    >>> len(photographs), photographs.labels
    (4, [3, 5, 0, 9])
    """

    def __init__(self, paths: Sequence[Path], labels: Sequence[int] | None = None, root: Path | None = None) -> None:
        self.paths = list(paths)
        self.labels = _as_labels(labels, len(self.paths))
        self.root = root

    @classmethod
    def from_folder(cls, folder: str | Path) -> Images:
        """A folder with ``labels.csv`` (``file,class_index``), an ImageFolder (``class/file``), an ImageNet
        validation folder (``n01440764/file``), or images without labels.

        >>> [path.name for path in sl.Images.from_folder("photographs").paths]
        ['cat.png', 'dog.png', 'plane.png', 'truck.png']
        """
        return cls(*find_images(Path(folder)), root=Path(folder))

    def __len__(self) -> int:
        return len(self.paths)

    def subset(self, indices: Iterable[int]) -> Images:
        """Some of the files, in this order.

        >>> sl.Images.from_folder("photographs").subset([1]).labels
        [5]
        """
        chosen = list(indices)
        labels = None if self.labels is None else [self.labels[index] for index in chosen]
        return Images([self.paths[index] for index in chosen], labels, self.root)

    def batches(
        self, target: Target, *, batch_size: int = 32, limit: int | None = None, progress: Progress | None = None
    ) -> Batches:
        """Batches at the target's input size; threads decode files ahead of the model.

        With a limit, images are spaced evenly over all files, so no class is favoured.

        >>> ((pixels, labels),) = sl.Images.from_folder("photographs").batches(target)
        >>> pixels.shape, labels
        (torch.Size([4, 3, 32, 32]), tensor([3, 5, 0, 9]))
        """
        chosen = _chosen(len(self), batch_size, limit)
        chunks = [chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)]
        read = _reader(target)
        pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="decode")

        def submit(chunk: list[int]) -> list[Future[Tensor]]:
            return [pool.submit(read, self.paths[index]) for index in chunk]

        try:
            ahead = deque(submit(chunk) for chunk in chunks[:BATCHES_AHEAD])
            for number, chunk in enumerate(chunks):
                levels = torch.stack([image.result() for image in ahead.popleft()])
                if number + BATCHES_AHEAD < len(chunks):
                    ahead.append(submit(chunks[number + BATCHES_AHEAD]))
                yield target.from_bytes(levels), _at(self.labels, chunk)
                if progress is not None:
                    progress(number * batch_size + len(chunk), len(chosen))
        finally:
            pool.shutdown(cancel_futures=True)

    def digest(self) -> str:
        """SHA-256 over the files' names and contents, independent of the folder's location.

        >>> photographs = sl.Images.from_folder("photographs")
        >>> photographs.digest() == photographs.subset([0]).digest()
        False
        """
        whole = hashlib.sha256()
        for path in self.paths:
            name = path.relative_to(self.root).as_posix() if self.root else path.name
            try:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            except OSError as error:
                raise FileError(f"{path} can't be read ({error.strerror})") from error
            whole.update(f"{content}  {name}\n".encode())
        return whole.hexdigest()


class Tensors:
    """Inputs in memory: pixels within the target's bounds, or uint8 levels over them.

    >>> data = sl.Tensors(images, labels)
    >>> len(data)
    4
    """

    def __init__(self, pixels: Tensor, labels: Tensor | Sequence[int] | None = None) -> None:
        self.pixels = pixels
        self.labels = _as_labels(labels, len(pixels))

    def __len__(self) -> int:
        return len(self.pixels)

    def subset(self, indices: Iterable[int]) -> Tensors:
        """Some of the inputs, in this order.

        >>> len(sl.Tensors(images).subset([0, 2]))
        2
        """
        chosen = list(indices)
        return Tensors(self.pixels[chosen], None if self.labels is None else [self.labels[index] for index in chosen])

    def batches(
        self, target: Target, *, batch_size: int = 32, limit: int | None = None, progress: Progress | None = None
    ) -> Batches:
        """Batches of the inputs; with a limit, evenly spaced ones.

        >>> [len(pixels) for pixels, _ in sl.Tensors(images).batches(target, batch_size=3)]
        [3, 1]
        """
        if tuple(self.pixels.shape[1:]) != target.input_shape:
            raise ValueError(f"expected inputs of shape {target.input_shape}, got {tuple(self.pixels.shape[1:])}")
        chosen = _chosen(len(self), batch_size, limit)
        for start in range(0, len(chosen), batch_size):
            chunk = chosen[start : start + batch_size]
            pixels = self.pixels[chunk]
            yield (
                target.from_bytes(pixels) if pixels.dtype == torch.uint8 else pixels,
                _at(self.labels, chunk),
            )
            if progress is not None:
                progress(start + len(chunk), len(chosen))

    def digest(self) -> str:
        """SHA-256 over the inputs' shape, type and bytes.

        >>> sl.Tensors(images).digest() == sl.Tensors(images.clone()).digest()
        True
        """
        array = self.pixels.detach().cpu().contiguous().numpy()
        return hashlib.sha256(f"{array.shape}{array.dtype.str}".encode() + array.tobytes()).hexdigest()


def read_image(path: Path, shape: Sequence[int], resample: Image.Resampling = Image.Resampling.BILINEAR) -> Tensor:
    """The image as uint8 levels (C, H, W): resized and centre-cropped exactly as torchvision does.

    Orientation tags are ignored, as in the evaluations behind published accuracies.
    """
    channels, height, width = shape
    return _levels(_centre(open_image(path, "L" if channels == 1 else "RGB"), height, width, resample))


def open_levels(path: Path, channels: int) -> Tensor:
    """The image as uint8 levels (C, H, W) at its own size."""
    return _levels(open_image(path, "L" if channels == 1 else "RGB"))


def read_for_object_detector(path: Path, resizing: Resizing, shape: Sequence[int] | None = None) -> Tensor:
    """The image as uint8 levels (3, H, W), resized as the object detector's own transform does.

    With a shape, only the centre is returned, its edges repeated if it is smaller: a part of what the backbone sees.
    """
    levels = resizing.resized(_levels(open_image(path, "RGB")))
    for axis, length in zip((1, 2), shape[1:] if shape else (), strict=False):
        start = max(0, (levels.shape[axis] - length) // 2)
        places = torch.arange(start, start + length).clamp(max=levels.shape[axis] - 1)
        levels = levels.index_select(axis, places)
    return levels


def open_image(path: Path, mode: str) -> Image.Image:
    """A file's image, converted to grey (L) or RGB."""
    with opened_image(path) as file:
        return in_mode(file, mode)


def _levels(image: Image.Image) -> Tensor:
    levels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return levels[None] if levels.dim() == 2 else levels.permute(2, 0, 1).contiguous()


def _centre(image: Image.Image, height: int, width: int, resample: Image.Resampling) -> Image.Image:
    fraction = CROP_FRACTION if min(height, width) >= SMALL else 1.0
    tall, wide = round(height / fraction), round(width / fraction)
    if tall * image.width >= wide * image.height:
        size = (int(tall * image.width / image.height), tall)
    else:
        size = (wide, int(wide * image.height / image.width))
    image = image.resize(size, resample)
    left, top = round((size[0] - width) / 2), round((size[1] - height) / 2)
    return image.crop((left, top, left + width, top + height))


def _reader(target: Target) -> Callable[[Path], Tensor]:
    """A function that reads a file as an input of the target's network."""
    resample = _resample(target)
    if target.normalises and is_object_detector(target.model):
        return partial(read_for_object_detector, resizing=Resizing.of(target.model), shape=target.input_shape)
    return partial(read_image, shape=target.input_shape, resample=resample)


def _resample(target: Target) -> Image.Resampling:
    if len(target.input_shape) != 3 or target.input_shape[0] not in (1, 3):
        raise ModelError(f"images need a model with 1 or 3 input channels, got shape {target.input_shape}")
    return Image.Resampling[resize_filter(target.reference).upper()]


def _as_labels(labels: Tensor | Sequence[int] | None, inputs: int) -> list[int] | None:
    if labels is not None and len(labels) != inputs:
        raise ValueError(f"expected one label per input, got {len(labels)} labels for {inputs} inputs")
    return None if labels is None else [int(label) for label in labels]


def _chosen(length: int, batch_size: int, limit: int | None) -> list[int]:
    if batch_size < 1:
        raise ValueError(f"expected batch_size of at least 1, got {batch_size}")
    return chosen_indices(length, limit)


def chosen_indices(length: int, limit: int | None) -> list[int]:
    """All indices below ``length``, or ``limit`` of them, evenly spaced."""
    if limit is not None and limit < 1:
        raise ValueError(f"expected limit of at least 1, got {limit}")
    count = length if limit is None else min(limit, length)
    return [position * length // count for position in range(count)]


def _at(labels: list[int] | None, chunk: Sequence[int]) -> Tensor | None:
    return None if labels is None else torch.tensor([labels[index] for index in chunk])
