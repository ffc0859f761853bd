"""Object detectors as torchvision builds them: which models they are, and to what sizes they resize images."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock.errors import ModelError
from stainlock.target import Target


@dataclass(frozen=True)
class Resizing:
    """How an object detector resizes images: all to one ``fixed`` size (rows, columns), or the shorter side to
    ``shorter`` unless the longer side would then exceed ``longer``. A batch is padded at the right and the bottom to a
    multiple of ``multiple``."""

    fixed: tuple[int, int] | None = None
    shorter: int = 0
    longer: int = 0
    multiple: int = 1

    @staticmethod
    def of(model: nn.Module) -> Resizing:
        """The resizing of an object detector built like torchvision's, which has a `transform`."""
        if not is_object_detector(model):
            raise ModelError(
                f"expected an object detector with a transform like torchvision's, got {type(model).__name__}: pass it"
                " images at its input size"
            )
        transform: Any = model.transform
        multiple = int(transform.size_divisible)
        if transform.fixed_size is not None:
            columns, rows = transform.fixed_size
            return Resizing((int(rows), int(columns)), multiple=multiple)
        return Resizing(None, int(transform.min_size[-1]), int(transform.max_size), multiple)

    @staticmethod
    def from_facts(facts: dict[str, Any]) -> Resizing:
        return Resizing(**{**facts, "fixed": tuple(facts["fixed"]) if facts["fixed"] else None})

    def facts(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def size(self, rows: int, columns: int) -> tuple[int, int]:
        """The size to which an image is resized; the transform leaves an image of this size as it is."""
        if self.fixed is not None:
            return self.fixed
        scale = min(self.shorter / min(rows, columns), self.longer / max(rows, columns))
        # The transform rounds down, but then an image with 799.9999 rows would become 799 and be resized once more.
        sides = [max(1, round(n * scale)) for n in (rows, columns)]
        return min(sides[0], self.longer), min(sides[1], self.longer)

    def resized(self, levels: Tensor) -> Tensor:
        """An 8-bit image ``(C, H, W)`` at the network's own size, resized as the transform would."""
        size = self.size(*levels.shape[-2:])
        if tuple(levels.shape[-2:]) == size:
            return levels
        smooth = F.interpolate(levels[None].float(), size=size, mode="bilinear", align_corners=False)[0]
        return smooth.round().clamp(0, 255).to(torch.uint8)

    def largest(self) -> tuple[int, int]:
        """The largest size a batch can have: that of a tall image and a wide one together."""
        rows, columns = self.fixed or (max(self.shorter, self.longer),) * 2
        return _up(rows, self.multiple), _up(columns, self.multiple)


def is_object_detector(model: nn.Module) -> bool:
    """Whether a model resizes and normalises a list of images itself, with a transform like torchvision's."""
    transform = getattr(model, "transform", None)
    return all(hasattr(transform, name) for name in ("image_mean", "min_size", "max_size", "fixed_size", "postprocess"))


def area_growth(target: Target) -> float:
    """The area of the largest input its backbone may receive, as a multiple of the area of the target's input."""
    if not target.normalises or not is_object_detector(target.model):
        return 1.0
    return max(1.0, math.prod(Resizing.of(target.model).largest()) / math.prod(target.input_shape[1:]))


def class_count(model: nn.Module) -> int | None:
    """How many classes an object detector distinguishes, including the background; None if its head does not say."""
    for name, module in model.named_modules():
        place = name.rpartition(".")[2]
        if place == "cls_score" and isinstance(module, nn.Linear):
            return module.out_features
        if place == "classification_head":
            number = getattr(module, "num_classes", getattr(module, "num_columns", None))
            return number if isinstance(number, int) else None
    return None


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
