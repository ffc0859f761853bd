"""Reading tensors from modules and model outputs. `exact` gives the float64 copies that edits are computed from."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.errors import ModelError


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


def copied(module: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A deep copy of a module that keeps the ``shared`` tensors instead of copying them.

    A module has a dozen dictionaries of hooks, nearly always empty, on which `copy` would spend half its time.
    """
    own = (value for part in module.modules() for value in vars(part).values())
    empty = {id(value): type(value)() for value in own if type(value) in (dict, OrderedDict) and not value}
    try:
        return copy.deepcopy(module, {**empty, **{id(tensor): tensor for tensor in shared}})
    except RuntimeError as error:  # PyTorch can't copy a computed tensor that the module keeps
        raise ModelError(
            f"{type(module).__name__} can't be copied, since it keeps tensors of its last run: protect a submodule"
            " that keeps none, as a Target of its own"
        ) from error


def at(maps: Tensor, position: tuple[int | slice, ...]) -> Tensor:
    """``maps[..., *position]``."""
    index: Any = (..., *position)
    selected: Tensor = maps[index]
    return selected


def entries_in(output: Any) -> list[tuple[str, Any]]:
    """The entries of a model's output, with their names, if it is a mapping, dataclass, named tuple, tuple or list."""
    if isinstance(output, Mapping):
        return [(str(name), value) for name, value in output.items()]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [(f.name, getattr(output, f.name)) for f in dataclasses.fields(output)]
    if isinstance(output, list | tuple):
        return list(zip(getattr(output, "_fields", map(str, range(len(output)))), output, strict=True))
    return []


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors in a model's output, however they are nested."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for _, value in entries_in(output) for tensor in tensors_in(value)]


def logits_in(output: Any) -> Any:
    """The logits of a model's output: the output itself, its entry of that name (or ``out``), or its only tensor.

    Other outputs are returned as they are.
    """
    entries = dict(entries_in(output))
    for name in ("logits", "out"):
        if isinstance(entries.get(name), Tensor):
            return entries[name]
    found = tensors_in(output)
    return found[0] if len(found) == 1 else output


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on a single thread: sums then have one order, and the same bits on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
