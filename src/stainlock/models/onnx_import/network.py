"""A module that runs an ONNX file's operations one after another.

Layers (convolutions, matrices, norms) are submodules with parameters of their own, so everything that works on modules
works on them. Values have their names from the file and are dropped after their last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.models.onnx_import.graph import Array, Graph


@dataclass(frozen=True)
class Value:
    """A value of the run, by its name in the file."""

    name: str


@dataclass(frozen=True)
class Held:
    """A stored tensor, by its name in the module."""

    name: str


@dataclass(frozen=True)
class Size:
    """A size that depends on the number N of images: constant + factor·N."""

    constant: int
    factor: int


@dataclass(frozen=True)
class Step:
    """One operation: ``call`` is a function, or the name of a submodule."""

    output: str
    call: Callable[..., Any] | str
    given: tuple[Any, ...]


@dataclass(frozen=True)
class Origin:
    """Where a tensor's values are in the file: a stored tensor, or a value computed from stored ones alone.

    ``turned`` means that the file has the matrix transposed. An empty name means that the file does not have the
    tensor: exporters leave out a bias of zeros, but a layer needs one to hold a threshold.
    """

    value: str
    turned: bool = False


@dataclass(frozen=True)
class Source:
    """The file that a module was made from, never changed: its graph, and the values that origins name.

    ``readers`` lists for each tensor of the module the operations that read it, by first output and place of the input.
    """

    graph: Graph
    values: dict[str, Array]
    readers: dict[str, list[tuple[str, int]]]
    rounds: bool = False  # whether it rounds maps to 8 bits

    def __deepcopy__(self, memo: Any) -> Source:
        return self


class OnnxNetwork(nn.Module):
    """The operations of a file. ``origins`` says which tensor of the file each parameter and buffer is."""

    def __init__(self, given: str, outputs: Sequence[str], *, last: bool = False) -> None:
        super().__init__()
        self.given, self.outputs = given, tuple(outputs)
        self.channels_last = last  # the file takes (N, H, W, C), the module (N, C, H, W)
        self.steps: list[Step] = []
        self.origins: dict[str, Origin] = {}
        self.source: Source | None = None

    def forward(self, images: Tensor) -> Any:
        batch = images.shape[0]
        values: dict[str, Any] = {self.given: torch.permute(images, (0, 2, 3, 1)) if self.channels_last else images}
        for step, over in zip(self.steps, self._over(), strict=True):
            values[step.output] = self.ran(step, values, batch)
            for name in over:
                values.pop(name, None)
        if len(self.outputs) == 1:
            return values[self.outputs[0]]
        return {name: values[name] for name in self.outputs}

    def ran(self, step: Step, values: Mapping[str, Any], batch: Any) -> Any:
        call = self.get_submodule(step.call) if isinstance(step.call, str) else step.call
        return call(*(self._resolved(one, values, batch) for one in step.given))

    def _resolved(self, given: Any, values: Mapping[str, Any], batch: Any) -> Any:
        if isinstance(given, Value):
            return values[given.name]
        if isinstance(given, Held):
            path, _, own = given.name.rpartition(".")
            return getattr(self.get_submodule(path), own)
        if isinstance(given, Size):
            scaled = batch if given.factor == 1 else batch * given.factor
            return scaled + given.constant if given.constant else scaled
        if isinstance(given, list | tuple):
            return type(given)(self._resolved(one, values, batch) for one in given)
        if isinstance(given, slice):
            return slice(*(self._resolved(one, values, batch) for one in (given.start, given.stop, given.step)))
        return given

    def _over(self) -> list[list[str]]:
        """For each step, the values that no later step reads."""
        seen = set(self.outputs)
        found: list[list[str]] = []
        for step in reversed(self.steps):
            read = _names_in(step.given)
            found.append([name for name in read if name not in seen])
            seen |= read
        return found[::-1]


def _names_in(given: Any) -> set[str]:
    if isinstance(given, Value):
        return {given.name}
    if isinstance(given, list | tuple):
        return {name for one in given for name in _names_in(one)}
    return set()
