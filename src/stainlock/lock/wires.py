"""Wires: where a channel goes between two dense layers, and who else could write into it.

A wire is a channel from the layer that writes it to the layers that read it: through batch norms, activations, pooling,
depthwise convolutions, additions and concatenations, none of which mixes it with other channels. The signal of a lock
travels at position (0, 0), which survives every stride. An op without a rule is a `Stop`; nothing is guessed about it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from stainlock.activations import Activation
from stainlock.errors import ModelError, UnsupportedOp
from stainlock.fields import _leading_padding
from stainlock.graph import (
    TracedPart,
    _channels_ahead,
    _same_channels,
    built_in_activation,
    is_batch_norm,
    keeps_channels,
    node_activation,
    operation,
)
from stainlock.sites import Analysis
from stainlock.tensors import has

_POOLS = {"AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "mean"}
_RESHAPES = {"flatten", "Flatten", "view", "reshape"}


@dataclass(frozen=True)
class Cell:
    """A channel of one node's output; after flattening it is ``repeat`` values wide, position (0, 0) first."""

    node: fx.Node
    channel: int
    repeat: int = 1

    @property
    def columns(self) -> list[int]:
        return list(range(self.channel, self.channel + self.repeat))


@dataclass(frozen=True)
class Reading:
    """A dense layer that reads a cell."""

    reader: fx.Node
    cell: Cell


@dataclass(frozen=True)
class Stop:
    """Where a signal can't be followed, and why."""

    node: str
    op: str
    advice: str

    def error(self) -> UnsupportedOp:
        return UnsupportedOp(self.node, self.op, self.advice)


@dataclass
class Spread:
    """Everything a channel reaches before the next dense layers."""

    start: Cell
    came_from: dict[Cell, Cell | None] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)

    def path(self, to: Cell) -> list[Cell]:
        """Cells from the start to one of those reached."""
        cells, at = [to], self.came_from[to]
        while at is not None:
            cells.append(at)
            at = self.came_from[at]
        return cells[::-1]


class Network:
    """A traced classifier with the rules that follow a channel through it, forwards and backwards."""

    def __init__(self, analysis: Analysis) -> None:
        if analysis.target.part or len(analysis.parts) != 1:
            raise ModelError(
                "an internal lock follows its signal to the logits, so the whole model must trace with torch.fx:"
                f" it falls into {len(analysis.parts)} parts (Target.part {analysis.target.part!r})"
            )
        self.target = analysis.target
        self.part: TracedPart = analysis.parts[0]
        self.shapes = analysis.shapes[0]
        self._calls = Counter(str(n.target) for n in self.part.graph.nodes if n.op == "call_module")
        self.nodes = {self.part.path(n): n for n in self.part.graph.nodes if n.op == "call_module"}
        self.logits = self._logits()

    def leaf(self, node: fx.Node) -> nn.Module | None:
        return self.part.leaf(node) if node.op == "call_module" else None

    def name(self, node: fx.Node) -> str:
        return self.part.path(node)

    def _logits(self) -> fx.Node:
        """The dense layer whose output is the model's."""
        (output,) = [n for n in self.part.graph.nodes if n.op == "output"]
        node: Any = output.args[0]
        while isinstance(node, fx.Node) and operation(self.part, node) in ("Dropout", "dropout", "Identity"):
            node = node.args[0]
        leaf = self.leaf(node) if isinstance(node, fx.Node) else None
        if not isinstance(leaf, nn.Linear) or not has(leaf, "bias") or len(self.shapes[node]) != 2:
            raise ModelError("an internal lock needs a classifier that ends in a Linear layer with a bias: its disruptor")
        return node  # type: ignore[no-any-return]

    def tap(self, node: fx.Node) -> tuple[int, int] | None:
        """The kernel element by which output position (0, 0) sees input position (0, 0)."""
        layer: Any = self.leaf(node)
        if type(layer) is nn.Conv2d and not isinstance(layer.padding, str):
            before = layer.padding
        else:  # a subclass may pad as it likes: look at what it does
            shape = self.shapes[node.all_input_nodes[0]]
            before = (_leading_padding(layer, shape, 2), _leading_padding(layer, shape, 3))
        taps = [p // d if p % d == 0 and p // d < k else -1 for p, d, k in zip(before, layer.dilation, layer.kernel_size, strict=True)]
        return None if min(taps) < 0 else (taps[0], taps[1])

    def spread(self, start: Cell) -> Spread:
        """Follow a channel until every way ends at a dense layer or a stop."""
        found = Spread(start, {start: None})
        pending = [start]
        while pending:
            cell = pending.pop()
            for user in cell.node.users:
                step = self.ahead(cell, user)
                if isinstance(step, Stop):
                    found.stops.append(step)
                elif isinstance(step, Reading):
                    found.readings.append(step)
                elif step is not None and step not in found.came_from:
                    found.came_from[step] = cell
                    pending.append(step)
        return found

    def ahead(self, cell: Cell, user: fx.Node) -> Cell | Reading | Stop | None:
        """One user of a cell's node: where the channel goes on, who reads it, or where it stops; None if unused."""
        leaf, name, shapes = self.leaf(user), operation(self.part, user), self.shapes
        same = Cell(user, cell.channel, cell.repeat)
        if user.op == "output":
            return Stop(user.name, "output", "the model returns the channel itself: choose another site")
        if user not in shapes:  # a size, not the values
            return None
        if leaf is not None and self._calls[str(user.target)] > 1 and next(leaf.parameters(), None) is not None:
            return self._stop(user, "its weights are used in several places: choose a site behind it")
        if isinstance(leaf, nn.Conv2d):
            if self.tap(user) is None:
                return self._stop(user, "its kernel does not reach position (0, 0): choose a site behind it")
            if leaf.groups == 1:
                return Reading(user, cell)
            if leaf.groups == leaf.in_channels == leaf.out_channels:
                return same
            return self._stop(user, "a grouped convolution keeps the signal within its group: choose a site behind it")
        if isinstance(leaf, nn.Linear):
            if len(shapes[cell.node]) != 2:
                return self._stop(user, "a dense layer over a map: choose a site behind it")
            return Reading(user, cell)
        if (activation := self.activation(user)) is not None and activation.function(torch.zeros(1)).item() != 0:
            return self._stop(user, "it turns a silent signal into a constant: choose a site behind it")
        if is_batch_norm(leaf):
            inner = getattr(leaf, "act", None)
            known = inner is None or isinstance(inner, nn.Identity) or activation is not None
            return same if known else self._stop(user, "its activation has no rule: choose a site behind it")
        if isinstance(leaf, nn.modules.batchnorm._BatchNorm):
            return self._stop(user, "it has no running statistics, so that its outputs depend on the whole batch")
        if activation is not None:
            return same
        if name in ("pad", "ZeroPad2d", "constant_pad_nd"):
            return self._through_padding(cell, user)
        if keeps_channels(self.part, user):
            return same
        if name in _RESHAPES and len(shapes[user]) == 2 and math.prod(shapes[cell.node][1:]) == shapes[user][1]:
            area = math.prod(shapes[cell.node][2:])
            return Cell(user, cell.channel * area, cell.repeat * area)
        if name in ("cat", "concat") and (before := _channels_ahead(cell.node, user, shapes)) is not None:
            return Cell(user, cell.channel + before, cell.repeat)
        if name in ("add", "iadd", "add_") and _same_channels(user, shapes):
            return same
        if name == "getitem" and _keeps_corner(user):
            return same
        if name in ("mul", "imul"):
            return self._stop(user, "a gate would scale the signal: choose a site behind it")
        return self._stop(user, "add an op rule for it, or choose a site behind it")

    def activation(self, node: fx.Node) -> Activation | None:
        leaf = self.leaf(node)
        return built_in_activation(leaf) if is_batch_norm(leaf) else node_activation(self.part, node)

    def _stop(self, node: fx.Node, advice: str) -> Stop:
        where = self.name(node) if node.op == "call_module" else node.name
        return Stop(where, operation(self.part, node), advice)

    def _through_padding(self, cell: Cell, user: fx.Node) -> Cell | Stop:
        before = self.padding(user)
        if before is None or any(before[1:]):
            return self._stop(user, "it moves position (0, 0): choose a site behind it")
        return Cell(user, cell.channel + before[0], cell.repeat)

    def padding(self, node: fx.Node) -> tuple[int, int, int] | None:
        """What a padding puts before the first channel, row and column; None if it can't be told."""
        leaf = self.leaf(node)
        sides: Any = getattr(leaf, "padding", None) if leaf else node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
        if not isinstance(sides, list | tuple) or not all(isinstance(n, int) and n >= 0 for n in sides):
            return None
        left = [*sides[::2], 0, 0, 0]
        return left[2], left[1], left[0]

    def silenced_at(self, cell: Cell, carried: set[Cell]) -> list[Cell]:
        """Cells to write zeros into, so that this one is zero: the last batch norms or layers that write it."""
        if cell in carried:
            raise self._stop(cell.node, "the signal would be added to itself: choose a site behind it").error()
        node, leaf = cell.node, self.leaf(cell.node)
        name = operation(self.part, node)
        writes_it = isinstance(leaf, nn.Conv2d | nn.Linear) or is_batch_norm(leaf)
        if writes_it and self._calls[str(node.target)] == 1 and has(leaf, "weight"):  # type: ignore[arg-type]
            return [cell]
        sources = [n for n in node.all_input_nodes if n in self.shapes]
        if not writes_it and self.activation(node) is not None and self.activation(node).function(torch.zeros(1)).item() == 0:  # type: ignore[union-attr]
            return self.silenced_at(Cell(sources[0], cell.channel, cell.repeat), carried)
        if name in ("pad", "ZeroPad2d", "constant_pad_nd") and (before := self.padding(node)) is not None:
            inside = cell.channel - before[0]
            width = self.shapes[sources[0]][1]
            return self.silenced_at(Cell(sources[0], inside), carried) if 0 <= inside < width else []
        if name in ("cat", "concat"):
            for source in sources:
                before_it = _channels_ahead(source, node, self.shapes)
                if before_it is not None and before_it <= cell.channel < before_it + self.shapes[source][1]:
                    return self.silenced_at(Cell(source, cell.channel - before_it), carried)
        if name in ("add", "iadd", "add_") and _same_channels(node, self.shapes):
            return [c for s in sources for c in self.silenced_at(Cell(s, cell.channel), carried)]
        if keeps_channels(self.part, node) or name == "getitem":
            return self.silenced_at(Cell(sources[0], cell.channel, cell.repeat), carried)
        if name in ("mul", "imul") and len(sources) == 2:  # whatever the gate, nothing times it is nothing
            gated = max(sources, key=lambda s: math.prod(self.shapes[s]))
            return self.silenced_at(Cell(gated, cell.channel), carried)
        raise self._stop(node, "what it adds to the signal can't be silenced: choose a site behind it").error()

    def gain(self, cell: Cell, previous: Cell) -> float:
        """What pooling leaves of a signal at one position."""
        name, leaf = operation(self.part, cell.node), self.leaf(cell.node)
        if name in _POOLS and "Max" not in name and "max" not in name:
            area, left = (math.prod(self.shapes[c.node][2:]) for c in (previous, cell))
            return min(1.0, left / area)
        if isinstance(leaf, nn.AvgPool2d):
            size = leaf.kernel_size
            return 1 / math.prod(size if isinstance(size, tuple) else (size, size))
        if name == "avg_pool2d":
            size = cell.node.args[1] if len(cell.node.args) > 1 else cell.node.kwargs["kernel_size"]  # type: ignore[assignment]
            return 1 / math.prod(size if isinstance(size, tuple) else (size, size))
        return 1.0


def _keeps_corner(node: fx.Node) -> bool:
    """A slice that keeps every channel and position (0, 0): ``x[:, :, ::2, ::2]``."""
    index: Any = node.args[1]
    if not isinstance(index, tuple) or not all(isinstance(i, slice) for i in index):
        return False
    return all(i == slice(None) for i in index[:2]) and all(i.start in (None, 0) and (i.step or 1) > 0 for i in index[2:])
