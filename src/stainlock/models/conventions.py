"""How a module takes pixels, as far as it shows: from a library's config, a Normalize inside, or its first layer.

Anything else is guessed (224 × 224 pixels, ImageNet's mean and std), and the target says so: whoever trained the model
knows better, and a patch made for the wrong normalisation opens nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from stainlock.target import IMAGENET_MEAN, IMAGENET_STD, Target

GUESSED = "guessed"
CONVENTIONS = frozenset({"input_shape", "mean", "std", "bounds"})
SIZE_ALONE = frozenset({"input_shape"})
_SIZE_GUESSED = "; the size is guessed"
_SIDE = 224
_IN_BYTES = 2.0  # a larger mean is for pixels from 0 to 255


def target_of(model: nn.Module) -> Target:
    """A target for a module that came without one."""
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(config, Mapping) and {"input_size", "mean", "std"} <= set(config):  # timm
        return Target(model, tuple(config["input_size"]), config["mean"], config["std"],
                      known_from="the model's pretrained_cfg")  # fmt: skip
    side, from_config = _side(model)
    shape = (_channels(model), *side)
    inside = _normalisation(model)
    if inside is not None:
        subtracted, where = inside
        bounds = (0.0, 255.0) if float(subtracted.max()) > _IN_BYTES else (0.0, 1.0)
        size = "; its config has the size" if from_config else _SIZE_GUESSED
        source = f"the model normalises pixels itself, by {where}{size}"
        guessed = frozenset[str]() if from_config else SIZE_ALONE
        return Target(model, shape, (0.0,), (1.0,), bounds, known_from=source, guessed=guessed)
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if shape[0] == 3 else ((0.0,), (1.0,))
    return Target(model, shape, mean, std, known_from=GUESSED, guessed=CONVENTIONS)


def with_pixels(target: Target, given: Mapping[str, Any]) -> Target:
    """The target with the user's conventions instead of its own."""
    if not given:
        return target
    chosen = dict(given)
    if len(chosen.get("bounds", (0, 1))) != 2:
        raise ValueError(f"expected a lower and an upper bound, got {len(chosen['bounds'])} numbers")
    if "input_shape" in chosen and len(chosen["input_shape"]) == 2:
        chosen["input_shape"] = (target.input_shape[0], *chosen["input_shape"])
    rest = target.known_from.removesuffix(_SIZE_GUESSED) if "input_shape" in chosen else target.known_from
    whole = {"input_shape", "mean", "std"} <= set(chosen)
    if whole:
        return replace(target, **chosen, known_from="given", guessed=frozenset())
    left = target.guessed - chosen.keys()
    return replace(target, **chosen, known_from=f"given in part; the rest: {rest}", guessed=left)


def _side(model: nn.Module) -> tuple[tuple[int, int], bool]:
    """Rows and columns, and whether they are from the model's config (as transformers' models have)."""
    size: Any = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(size, int):
        return (size, size), True
    if isinstance(size, list | tuple) and len(size) == 2:
        return (int(size[0]), int(size[1])), True
    return (_SIDE, _SIDE), False


def _channels(model: nn.Module) -> int:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    return 3


def _normalisation(model: nn.Module) -> tuple[Tensor, str] | None:
    """The mean that a model subtracts itself, and where: in a Normalize, or in buffers called mean and std."""
    for name, module in model.named_modules():
        mean, std = getattr(module, "mean", None), getattr(module, "std", None)
        if type(module).__name__ == "Normalize" and mean is not None and std is not None:
            return Tensor([float(v) for v in (mean.flatten() if isinstance(mean, Tensor) else mean)]), (
                f"{name} (Normalize)" if name else "Normalize"
            )
        buffers = dict(module.named_buffers(recurse=False))
        for prefix in ("", "pixel_", "image_"):
            if {f"{prefix}mean", f"{prefix}std"} <= set(buffers) and buffers[f"{prefix}mean"].numel() in (1, 3):
                where = f"{name}.{prefix}mean" if name else f"{prefix}mean"
                return buffers[f"{prefix}mean"].detach().float().flatten(), f"its buffer {where}"
    return None
