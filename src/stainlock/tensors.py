"""Reading a module's numbers: as float64 on the CPU, where scalars are solved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
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


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch with a single thread: sums are made in one order, and give the same bits on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
