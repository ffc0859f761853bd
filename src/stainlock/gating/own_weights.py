"""Inputs of a layer that carry the weights they are to be multiplied by.

A hook can change its layer's input, but not its weights. So it passes a tensor that, when convolved or multiplied with
the layer's weight, uses the right weight instead. Every other operation sees an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from stainlock.gating.gated import Gated, gathered, permuted

# Reordering one weight takes as long as reordering this many values of a map, which are copied in whole rows.
_COLUMN_COST = 8


class Reordered(Tensor):
    """``x[π]``, for a layer that can multiply x by W'[:, π⁻¹] instead; every other operation sees ``x[π]``."""

    order: Tensor
    undone: Tensor  # π⁻¹
    gated: Gated

    @staticmethod
    def of(x: Tensor, order: Tensor, inverse: Tensor, gated: Gated) -> Reordered:
        own = x.as_subclass(Reordered)
        own.order, own.undone, own.gated = order, inverse, gated
        return own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (F.conv2d, F.conv3d, F.linear) and isinstance(args[0], Reordered):
                x, weight, *others = args
                columns = weight.index_select(1, x.undone)
                return func(x.as_subclass(Tensor), columns, *others, **(kwargs or {}))
            args, kwargs = tree_map_only(Reordered, _in_order, (args, kwargs or {}))
            return func(*args, **kwargs)


def _in_order(x: Reordered) -> Tensor:
    return permuted(x.as_subclass(Tensor), x.order, x.gated)


def columns_are_fewer(layer: nn.Module, x: Tensor) -> bool:
    """Whether reordering the layer's weight is faster than its input; False for subclasses, which may do more."""
    multiplies = type(layer) is nn.Linear or (type(layer) in (nn.Conv2d, nn.Conv3d) and layer.padding_mode == "zeros")
    return multiplies and isinstance(layer.weight, Tensor) and _COLUMN_COST * layer.weight.numel() < x.numel()


class Scattered(Tensor):
    """``x``, for a scattered layer: it is multiplied by W, put in order by one key for all images or one per image."""

    orders: Tensor

    @staticmethod
    def of(x: Tensor, orders: Tensor) -> Scattered:
        own = x.as_subclass(Scattered)
        own.orders = orders
        return own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (F.conv2d, F.conv3d, F.linear) and isinstance(args[0], Scattered):
                x, weight, *others = args
                return by_own_weights(func, x.as_subclass(Tensor), weight, x.orders, *others, **(kwargs or {}))
            args, kwargs = tree_map_only(Scattered, lambda own: own.as_subclass(Tensor), (args, kwargs or {}))
            return func(*args, **kwargs)


def by_own_weights(
    multiply: Callable[..., Tensor], images: Tensor, weight: Tensor, orders: Tensor, *others: Any, **options: Any
) -> Tensor:
    """The output of a scattered layer for images that share one key, or have one each."""
    parts = images.split(1) if len(orders) > 1 else (images,)
    found = [
        multiply(part, gathered(weight, own)[0], *others, **options)
        for part, own in zip(parts, orders.split(1), strict=True)
    ]
    return torch.cat(found) if len(found) > 1 else found[0]
