"""Reading a module's numbers: as float64 on the CPU, where scalars are solved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def has(module: nn.Module, name: str) -> bool:
    """Whether the module has this parameter or buffer (an absent one is None)."""
    return getattr(module, name, None) is not None


def raw(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer itself, detached."""
    value = getattr(module, name)
    assert isinstance(value, Tensor)
    return value.detach()


def exact(module: nn.Module, name: str) -> Tensor:
    """A float64 copy on the CPU."""
    return raw(module, name).double().cpu()


def at(maps: Tensor, position: tuple[int | slice, ...]) -> Tensor:
    """``maps[..., *position]``."""
    index: Any = (..., *position)
    selected: Tensor = maps[index]
    return selected


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors of a model's output, however it is packed."""
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output
    return [tensor for value in values for tensor in tensors_in(value)]
