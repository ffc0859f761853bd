"""Differences between two ONNX files: stored tensors by name, and operations."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stainlock.errors import FileError
from stainlock.plan import Change
from stainlock.storage.onnx_files import nodes_of, read_onnx, tensors_of
from stainlock.storage.values import shown
from stainlock.storage.weights import one_line


@dataclass(frozen=True)
class OnnxChanges:
    """Tensors with different values, tensors that only one file has, and operations that one file has more of."""

    changes: list[Change]
    added: list[str]
    removed: list[str]
    operations_added: dict[str, int]
    operations_removed: dict[str, int]

    @property
    def any(self) -> bool:
        return bool(self.changes or self.added or self.removed or self.operations_added or self.operations_removed)


def onnx_changes(base: str | Path, other: str | Path) -> OnnxChanges:
    """What changed from one file to the other. Neither is run."""
    before, after = read_onnx(base), read_onnx(other)
    old, new = _arrays(before, base), _arrays(after, other)
    changes = [_change(name, old[name], new[name]) for name in old if name in new]
    counts = [Counter(str(node.op_type) for node in nodes_of(model)) for model in (before, after)]
    return OnnxChanges(
        [change for change in changes if change.elements],
        [name for name in new if name not in old],
        [name for name in old if name not in new],
        dict(counts[1] - counts[0]),
        dict(counts[0] - counts[1]),
    )


def _change(name: str, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> Change:
    """A tensor whose shape or type differs counts as changed everywhere."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return Change(name, int(new.size) or 1, float(np.abs(new.astype(np.float64)).max(initial=0.0)))
    moved = np.abs(new.astype(np.float64) - old.astype(np.float64))
    return Change(name, int((moved != 0).sum()), float(moved.max(initial=0.0)))


def _arrays(model: Any, path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    helper: Any = importlib.import_module("onnx.numpy_helper")
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in tensors_of(model):
        if tensor.data_type == tensor.STRING:
            continue
        try:
            found[name] = helper.to_array(tensor)
        except Exception as error:  # the tensor's header may claim anything
            raise FileError(f"{path} is damaged: {shown(name)} can't be read ({one_line(error)})") from error
    return found
