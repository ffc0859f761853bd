"""Weights that an ONNX file stores in 8 bits: what a stain writes is rounded to the file's own quantisation steps.

The file stores integers q with a scale s and a zero point z, and DequantizeLinear computes s·(q − z). A weight w
becomes q = clamp(round(w/s) + z). A stained layer in floats would stand out among the others.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stainlock.models.onnx_import.graph import Array, attributes
from stainlock.models.onnx_import.network import OnnxNetwork, Source
from stainlock.target import Target


@dataclass(frozen=True)
class Steps:
    """A tensor that a file stores as integers: its name, values, scale and zero point."""

    name: str
    stored: Array
    scale: Array
    zero: Array

    def rounded(self, values: Array) -> Array:
        """The integers nearest to these values, within the type's range."""
        limits = np.iinfo(self.stored.dtype)
        steps: Array = np.rint(values.astype(np.float64) / self.scale) + self.zero
        return steps.clip(limits.min, limits.max).astype(self.stored.dtype)

    def values(self, steps: Array) -> Array:
        """What the file computes from these integers, in float32 as the file does."""
        return ((steps.astype(np.float32) - self.zero.astype(np.float32)) * self.scale).astype(np.float32)


def steps_of(source: Source, value: str) -> Steps | None:
    """How a value is stored as integers; None if it is not, or if it or the stored tensor has several readers."""
    node: Any = source.graph.makers.get(value)
    stored = source.graph.stored
    if node is None or node.op_type != "DequantizeLinear" or any(name and name not in stored for name in node.input):
        return None
    kept = stored[node.input[0]]
    if source.graph.uses[node.input[0]] != 1 or source.graph.uses[value] != 1 or kept.dtype.kind not in "iu":
        return None
    said = attributes(node)
    if said.get("block_size", 0):
        return None
    axis = said.get("axis", 1) % max(1, kept.ndim)
    zero = stored[node.input[2]] if len(node.input) > 2 and node.input[2] else np.zeros((), np.float32)
    scale, zero = (_along(one, axis, kept.ndim) for one in (stored[node.input[1]], zero))
    return Steps(node.input[0], kept, scale.astype(np.float32), zero)


def _along(numbers: Array, axis: int, rank: int) -> Array:
    if numbers.size == 1:
        return numbers.reshape(())
    return numbers.reshape([-1 if place == axis else 1 for place in range(rank)])


def in_steps_of_the_file(target: Target) -> Target:
    """The target with its 8-bit weights rounded to values that its ONNX file can store."""
    network = target.model
    if not isinstance(network, OnnxNetwork) or network.source is None:
        return target
    found = copy.deepcopy(network)
    state, source = found.state_dict(), network.source
    for name, origin in network.origins.items():
        steps = steps_of(source, origin.value) if origin.value else None
        if steps is None:
            continue
        tensor = state[name]
        mine = (tensor.T if origin.turned else tensor).detach().cpu().contiguous().numpy()
        if not np.array_equal(mine.reshape(steps.stored.shape), source.values[origin.value]):
            kept = torch.from_numpy(steps.values(steps.rounded(mine.reshape(steps.stored.shape))).reshape(mine.shape))
            with torch.no_grad():
                tensor.copy_(kept.T if origin.turned else kept)
    return target.with_model(found)
