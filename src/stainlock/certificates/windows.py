"""φ at the positions of a layer, one batch at a time and without unfolding it.

A convolution's φ is the vector under its kernel. Padding, stride and dilation are taken from the layer's own call,
whatever subclass it is. Norms are then the root of a box filter over the sum of squares of the channels, and the sum of
all windows follows from the sum of the batch, a single map.

Positions are either all of them, or those whose windows do not overlap, as in the paper: the first, and from there in
the smallest step between the layer's own positions that is at least as wide as its (dilated) kernel. A token of a
linear layer, or a position of a transposed convolution (the paper's c×1×1 form), is a window by itself.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stainlock.errors import SiteError
from stainlock.network.network import Site
from stainlock.numerics import at
from stainlock.target import Target

Sides = tuple[int, ...]  # rows and columns; for video, frames before them


class Windows(Protocol):
    """The windows of one batch, for one group of the layer's inputs if it has several."""

    def norms(self, group: int) -> Tensor:
        """‖φ‖ at every position: ``(N, P)``."""

    def responses(self, detectors: Tensor, group: int) -> Tensor:
        """v·φ of detectors ``(D, d)`` at every position: ``(N, D, P)``."""

    def vectors(self, places: Tensor, group: int) -> Tensor:
        """φ itself at a few positions, counted along ``P``: ``(N, len(places), d)``."""

    def total(self) -> Tensor:
        """What to add up over batches, for `sum_of`."""

    def sum_of(self, total: Tensor, group: int) -> Tensor:
        """The sum of φ over images and positions, ``(d,)``, from the accumulated total."""


def windows_of(target: Target, site: Site, features: Tensor, images: int, *, overlapping: bool) -> Windows:
    """The windows that the site's layer sees in the features, its input for a batch of images."""
    if not features.is_floating_point() or features.dtype in (torch.float16, torch.bfloat16):
        features = features.float()
    if site.kind == "convolution":
        return _convolution(site.layer(target.model), features, overlapping)
    if site.kind == "transposed":
        return Vectors(features.flatten(2).transpose(1, 2))
    if features.dim() == 3 and features.shape[1] == images and site.grid == (1,):
        features = features.transpose(0, 1)  # tokens first, images second (``batch_first=False``)
    elif features.shape[0] % images or (site.grid and tuple(features.shape[1:-1]) != site.grid):
        raise SiteError(
            f"{site.name} gets {tuple(features.shape)} for {images} images: expected images along the first axis"
        )
    return Vectors(features.reshape(images, -1, features.shape[-1]))


@dataclass(frozen=True)
class Vectors:
    """Every position is a vector: ``(N, P, d)``."""

    features: Tensor

    def norms(self, group: int) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.features, dim=2)
        return norms

    def responses(self, detectors: Tensor, group: int) -> Tensor:
        return (self.features @ detectors.to(self.features).T).transpose(1, 2)

    def vectors(self, places: Tensor, group: int) -> Tensor:
        return self.features[:, places]

    def total(self) -> Tensor:
        return self.features.sum((0, 1)).cpu().double()

    def sum_of(self, total: Tensor, group: int) -> Tensor:
        return total


@dataclass(frozen=True)
class ConvolutionWindows:
    """A convolution's input ``(N, C, H, W)``, for video ``(N, C, T, H, W)``, and its geometry; ``step`` is the stride
    between the windows."""

    features: Tensor
    kernel: Sides
    step: Sides
    padding: Sides
    dilation: Sides
    groups: int

    def norms(self, group: int) -> Tensor:
        # Image by image, so that the squares stay in the processor's cache.
        squares = torch.stack([image.square().sum(0, keepdim=True) for image in self._of(self.features, group)])
        if self._pointwise:
            return at(squares[:, 0], self._steps).sqrt().flatten(1)
        ones = squares.new_ones(1, 1, *self.kernel)
        sums = self._convolved(squares, ones)
        return sums.clamp(min=0).sqrt().flatten(1)

    def responses(self, detectors: Tensor, group: int) -> Tensor:
        mine = self._of(self.features, group)
        if self._pointwise:  # a matrix product is several times as fast
            return detectors.to(mine) @ at(mine, self._steps).flatten(2)
        kernels = detectors.to(mine).view(len(detectors), mine.shape[1], *self.kernel)
        return self._convolved(mine, kernels).flatten(2)

    def vectors(self, places: Tensor, group: int) -> Tensor:
        padded = self._padded(self._of(self.features, group))
        starts = [self._starts(padded.shape[axis + 2], axis) for axis in range(len(self.kernel))]
        taps = [torch.arange(k) * d for k, d in zip(self.kernel, self.dilation, strict=True)]
        cut = []
        for place in places.tolist():
            window = padded
            for axis, index in enumerate(np.unravel_index(place, [len(own) for own in starts])):
                window = window.index_select(axis + 2, (starts[axis][index] + taps[axis]).to(padded.device))
            cut.append(window.flatten(1))
        return torch.stack(cut, 1)

    def total(self) -> Tensor:
        return self.features.sum(0).cpu().double()

    def sum_of(self, total: Tensor, group: int) -> Tensor:
        padded = self._padded(self._of(total[None], group))[0]
        starts = [self._starts(padded.shape[axis + 1], axis) for axis in range(len(self.kernel))]
        taps = []
        for tap in itertools.product(*(range(k) for k in self.kernel)):
            seen = padded
            for axis, (own, number, apart) in enumerate(zip(starts, tap, self.dilation, strict=True)):
                seen = seen.index_select(axis + 1, own + number * apart)
            taps.append(seen.flatten(1).sum(1))
        return torch.stack(taps, 1).flatten()

    @property
    def _pointwise(self) -> bool:
        return max(self.kernel) == 1 and max(self.padding) == 0

    @property
    def _steps(self) -> tuple[slice, ...]:
        return tuple(slice(None, None, step) for step in self.step)

    def _convolved(self, maps: Tensor, kernels: Tensor) -> Tensor:
        convolved: Any = F.conv2d if len(self.kernel) == 2 else F.conv3d
        found: Tensor = convolved(maps, kernels, None, self.step, self.padding, self.dilation)
        return found

    def _padded(self, maps: Tensor) -> Tensor:
        return F.pad(maps, [n for side in reversed(self.padding) for n in (side, side)])

    def _of(self, maps: Tensor, group: int) -> Tensor:
        channels = maps.shape[1] // self.groups
        return maps if self.groups == 1 else maps[:, group * channels : (group + 1) * channels]

    def _starts(self, size: int, axis: int) -> Tensor:
        extent = (self.kernel[axis] - 1) * self.dilation[axis] + 1
        return torch.arange(0, size - extent + 1, self.step[axis])


class _Called(Exception):
    """Ends a layer's forward pass where it convolves."""


class _Convolution(TorchFunctionMode):
    """Inside, the first convolution is not computed: its arguments are stored."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.conv2d, torch.conv3d):
            return func(*args, **(kwargs or {}))
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        self.arguments: dict[str, Any] = defaults | dict(zip(names, args, strict=False)) | (kwargs or {})
        raise _Called


def _convolution(layer: torch.nn.Module, features: Tensor, overlapping: bool) -> ConvolutionWindows:
    call = _Convolution()
    try:
        with call:
            layer.forward(features)
    except _Called:
        pass
    else:
        raise SiteError(f"{type(layer).__name__} does not call torch's conv2d or conv3d: its windows are not known")
    given = call.arguments
    kernel: Sides = tuple(given["weight"].shape[2:])
    stride, dilation = _sides(given["stride"], len(kernel)), _sides(given["dilation"], len(kernel))
    extent = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    maps, padding = given["input"], (0,) * len(kernel)
    if given["padding"] == "same":
        maps = F.pad(maps, [n for e in reversed(extent) for n in ((e - 1) // 2, e // 2)])
    elif given["padding"] != "valid":
        padding = _sides(given["padding"], len(kernel))
    apart = [1 if overlapping else math.ceil(e / s) for e, s in zip(extent, stride, strict=True)]
    step = tuple(s * a for s, a in zip(stride, apart, strict=True))
    return ConvolutionWindows(maps, kernel, step, padding, dilation, int(given["groups"]))


def _sides(value: Any, count: int) -> Sides:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers if len(numbers) == count else numbers[:1] * count
