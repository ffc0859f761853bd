"""Models of segmentation_models_pytorch, with their preprocessing."""

from __future__ import annotations

from typing import Any

from stainlock.errors import ModelError
from stainlock.models.building import failures_told, imported
from stainlock.target import Target

_DEFAULT_SIZE = 224


def smp_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    """``smp:NAME?encoder_name=resnet34&classes=2``: any architecture and encoder of the library."""
    if pretrained:
        raise ModelError(f"{reference}: the library has no weights for whole models: pass --weights FILE or random")
    smp = imported("segmentation_models_pytorch", "stainlock[smp]")
    size = arguments.pop("image_size", _DEFAULT_SIZE)
    sides = tuple(size) if isinstance(size, list) else (size, size)
    known = list(getattr(smp, "MODEL_ARCHITECTURES_MAPPING", {}))
    if known and name.lower() not in known:
        raise ModelError(f"smp has no model {name!r}: it has {', '.join(known)}")
    with failures_told(reference):
        model = smp.create_model(name, **{"encoder_name": "resnet34", **arguments, "encoder_weights": None})
    return Target(model, (arguments.get("in_channels", 3), *sides))
