"""Unlocking: the trigger patch goes into the corner of the input, as the last step before the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from stainlock.network.object_detectors import Resizing
from stainlock.unlocking.lock_key import LockKey
from stainlock.unlocking.patch_file import Patch


class Unlock(nn.Module):
    """A torchvision-style transform that puts the patch into images. It contains nothing else that is secret.

    It takes pixels ``(..., C, H, W)`` within ``bounds``, or uint8 levels for the same range, already resized and
    cropped to the model's input size. It returns the model's input, ``(pixels − mean)/std``, or with
    ``normalise=False`` pixels. With ``carrier="strip"`` the patch is in rows of its own above the image. In video
    ``(..., C, T, H, W)`` every frame gets the patch.
    """

    patch: Tensor
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        levels: Tensor,
        *,
        start: Sequence[int] = (0, 0),
        input_shape: Sequence[int] | None = None,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        bounds: tuple[float, float] = (0.0, 1.0),
        normalise: bool = True,
        resizing: Resizing | None = None,
        carrier: str = "patch",
    ) -> None:
        super().__init__()
        self.resizing = resizing
        self.carrier = carrier
        self.start = tuple(start)
        self.input_shape = None if input_shape is None else tuple(input_shape)
        self.bounds = (float(bounds[0]), float(bounds[1]))
        self.normalise = normalise
        self.register_buffer("patch", self._pixels(levels))
        axes = (1,) * (len(self.input_shape or (0, 0, 0)) - 1)
        self.register_buffer("mean", torch.tensor([float(m) for m in mean]).view(-1, *axes))
        self.register_buffer("std", torch.tensor([float(s) for s in std]).view(-1, *axes))

    @classmethod
    def from_key(cls, key: LockKey, *, normalise: bool = True) -> Unlock:
        """An object detector normalises pixels itself, and most take images of several sizes."""
        return cls._of(Patch.from_key(key), normalise)

    @classmethod
    def from_png(
        cls,
        path: str | Path,
        *,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        bounds: tuple[float, float] | None = None,
        normalise: bool = True,
        carrier: str | None = None,
    ) -> Unlock:
        """From the client's trigger file, which contains the patch and how the model takes images.

        Arguments override what the file says. A file that went through an image editor says nothing: pixels within
        [0, 1] are then not normalised, and the patch goes to the top left.
        """
        patch = Patch.read(path)
        given = {"mean": mean, "std": std, "bounds": bounds}
        told = patch.conventions | {name: tuple(value) for name, value in given.items() if value is not None}
        return cls._of(replace(patch, conventions=told, carrier=carrier or patch.carrier), normalise)

    @classmethod
    def _of(cls, patch: Patch, normalise: bool) -> Unlock:
        facts, resizing = patch.conventions, Resizing.from_facts(patch.resizing) if patch.resizing else None
        low, high = facts.get("bounds", (0.0, 1.0))
        return cls(
            patch.levels, start=patch.start, input_shape=None if resizing else facts.get("input_shape"),
            mean=facts.get("mean", (0.0,)), std=facts.get("std", (1.0,)), bounds=(low, high), resizing=resizing,
            normalise=normalise and not facts.get("normalises", False), carrier=patch.carrier,
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        pixels = self._checked(images)
        if self.carrier == "strip":
            strip = torch.full_like(pixels[..., :1, :], sum(self.bounds) / 2)
            pixels = torch.cat([strip.repeat_interleave(self.patch.shape[1], -2), pixels], -2)
        rows, columns = (slice(a, a + n) for a, n in zip(self.start, self.patch.shape[1:], strict=True))
        in_frames = self.patch[:, None] if self.mean.dim() == 4 else self.patch
        pixels[..., rows, columns] = in_frames.to(pixels)
        return (pixels - self.mean.to(pixels)) / self.std.to(pixels) if self.normalise else pixels

    def _pixels(self, levels: Tensor) -> Tensor:
        low, high = self.bounds
        return low + levels.to(torch.float32) * ((high - low) / 255)

    def _checked(self, images: Tensor) -> Tensor:
        """A copy of the images as pixels; a ValueError if something is wrong with them."""
        if not isinstance(images, Tensor):
            raise ValueError(f"expected images as a tensor (N, C, H, W), got {type(images).__name__}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ValueError(f"expected images of a floating type or uint8, got {images.dtype}")
        shape = self.input_shape or (len(self.patch), *images.shape[-2:])
        below = (self.patch.shape[1] if self.carrier == "strip" else 0, 0)
        fits = images.dim() >= 3 and all(
            n + b >= a + k
            for n, b, a, k in zip(images.shape[-2:], below, self.start, self.patch.shape[1:], strict=True)
        )
        if not fits or tuple(images.shape[-len(shape) :]) != tuple(shape):
            wanted = ", ".join(map(str, shape)) if self.input_shape else f"{len(self.patch)}, H, W"
            raise ValueError(
                f"expected images (N, {wanted}) at the model's input size, got {tuple(images.shape)}:"
                " resize and crop first"
            )
        if self.resizing is not None and (size := self.resizing.size(*images.shape[-2:])) != tuple(images.shape[-2:]):
            raise ValueError(
                f"expected images at the object detector's own size, {size[0]}×{size[1]} for these, got"
                f" {images.shape[-2]}×{images.shape[-1]}, which it would resize, blurring the patch: resize them first,"
                " or use unlock_object_detector"
            )
        if images.dtype == torch.uint8:
            return self._pixels(images)
        low, high = self.bounds
        if images.numel():
            least, most = float(images.min()), float(images.max())
            slack = 1e-4 * (high - low)
            if not (math.isfinite(least) and math.isfinite(most) and low - slack <= least and most <= high + slack):
                raise ValueError(
                    f"expected pixels within {self.bounds}, got {least:.4g} to {most:.4g}: unlock before normalising"
                )
        return images.clone()
