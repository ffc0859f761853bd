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

from stainlock.errors import ModelError, UnsupportedOp
from stainlock.network.activations import Activation
from stainlock.network.blocks import RESHAPES, find_blocks
from stainlock.network.fields import _leading_padding
from stainlock.network.graph import (
    TracedPart,
    _channels_ahead,
    _same_channels,
    built_in_activation,
    is_batch_norm,
    keeps_channels,
    node_activation,
    operation,
    tracing_problem,
)
from stainlock.network.sites import Analysis
from stainlock.tensors import has

_POOLS = {"AdaptiveAvgPool2d", "AdaptiveMaxPool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "mean"}


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
        if len(analysis.parts) != 1 or analysis.parts[0].name != analysis.target.part:
            problem = tracing_problem(analysis.target.traced)
            raise ModelError(
                f"a lock follows its signal through {analysis.target.part or 'the network'}, so that must trace with"
                f" torch.fx as a whole, which fails {problem}; name a part that traces with Target(part=...)"
            )
        self.target = analysis.target
        self.part: TracedPart = analysis.parts[0]
        self.shapes = analysis.shapes[0]
        self.calls = Counter(str(n.target) for n in self.part.graph.nodes if n.op == "call_module")
        self.nodes = {self.part.path(n): n for n in self.part.graph.nodes if n.op == "call_module"}
        self._taps: dict[fx.Node, tuple[int, int] | None] = {}
        self._rests: dict[fx.Node, bool] = {}
        self._steps: dict[tuple[fx.Node, fx.Node], Cell | Reading | Stop | None] = {}
        self.blocks = find_blocks(self.part, self.shapes)
        self._last = self._find_logits()
        # Where a map is pooled to a larger one, position (0, 0) appears in several places.
        self.repeats_positions = any(
            self.gain_of_area(n) > 1 for n in self.part.graph.nodes if operation(self.part, n) in _POOLS
        )

    def leaf(self, node: fx.Node) -> nn.Module | None:
        return self.part.leaf(node) if node.op == "call_module" else None

    def name(self, node: fx.Node) -> str:
        return self.part.path(node)

    def path(self, module: str) -> str:
        """The name in the whole model of a module of the traced part."""
        return ".".join(filter(None, (self.part.name, module)))

    def around(self, node: fx.Node) -> list[str]:
        """The modules whose code calls an operation, the outermost first, by their names in the traced part."""
        return [name for name, _ in node.meta.get("nn_module_stack", {}).values()]

    def calls_of(self, module: str) -> int:
        """How often a module is called."""
        stacks = [node.meta.get("nn_module_stack", {}) for node in self.part.graph.nodes]
        return len({call for stack in stacks for call, (name, _) in stack.items() if name == module})

    @property
    def logits(self) -> fx.Node:
        """The dense layer whose output is the model's."""
        if self._last is None:
            raise ModelError(
                "an internal lock needs a classifier that ends in a Linear layer with a bias, its disruptor:"
                " use kind squeeze-excite"
            )
        return self._last

    @property
    def has_logits(self) -> bool:
        return self._last is not None

    def ends_at(self, node: fx.Node) -> bool:
        return node is self._last

    def _find_logits(self) -> fx.Node | None:
        (output,) = [n for n in self.part.graph.nodes if n.op == "output"]
        node: Any = output.args[0]
        while isinstance(node, fx.Node) and operation(self.part, node) in ("Dropout", "dropout", "Identity"):
            node = node.args[0]
        leaf = self.leaf(node) if isinstance(node, fx.Node) else None
        ends = isinstance(leaf, nn.Linear) and has(leaf, "bias") and len(self.shapes[node]) == 2
        return node if ends and not self.target.part else None

    def tap(self, node: fx.Node) -> tuple[int, int] | None:
        """The kernel element by which output position (0, 0) sees input position (0, 0)."""
        if node not in self._taps:
            self._taps[node] = self._find_tap(node)
        return self._taps[node]

    def _find_tap(self, node: fx.Node) -> tuple[int, int] | None:
        layer: Any = self.leaf(node)
        if type(layer) is nn.Conv2d and not isinstance(layer.padding, str):
            before = layer.padding
        else:  # a subclass may pad as it likes: look at what it does
            shape = self.shapes[node.all_input_nodes[0]]
            before = (_leading_padding(layer, shape, 2), _leading_padding(layer, shape, 3))
        taps = [
            p // d if p % d == 0 and p // d < k else -1
            for p, d, k in zip(before, layer.dilation, layer.kernel_size, strict=True)
        ]
        return None if min(taps) < 0 else (taps[0], taps[1])

    def spread(self, start: Cell, end: fx.Node | None = None) -> Spread:
        """Follow a channel until every way ends at a dense layer, at ``end``, or at a stop."""
        found = Spread(start, {start: None})
        pending = [start]
        while pending:
            cell = pending.pop()
            for user in cell.node.users:
                step = Reading(user, cell) if user is end else self.ahead(cell, user)
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
        if (cell.node, user) not in self._steps:
            self._steps[cell.node, user] = self._step(Cell(cell.node, 0), user)
        step = self._steps[cell.node, user]  # of channel 0: the others go the same way
        if isinstance(step, Reading):
            return Reading(user, cell)
        if isinstance(step, Cell):
            return Cell(user, cell.channel * step.repeat + step.channel, cell.repeat * step.repeat)
        return step

    def _step(self, cell: Cell, user: fx.Node) -> Cell | Reading | Stop | None:
        leaf, name, shapes = self.leaf(user), operation(self.part, user), self.shapes
        same = Cell(user, cell.channel, cell.repeat)
        if user.op == "output":
            return Stop(user.name, "output", "the model returns the channel itself: choose another site")
        if user not in shapes:  # a size, not the values
            return None
        if leaf is not None and self.calls[str(user.target)] > 1 and next(leaf.parameters(), None) is not None:
            return self.stop(user, "its weights are used in several places: choose a site behind it")
        if isinstance(leaf, nn.Conv2d):
            if self.tap(user) is None:
                return self.stop(user, "its kernel does not reach position (0, 0): choose a site behind it")
            if leaf.groups == 1:
                return Reading(user, cell)
            if leaf.groups == leaf.in_channels == leaf.out_channels:
                return same
            return self.stop(user, "a grouped convolution keeps the signal within its group: choose a site behind it")
        if isinstance(leaf, nn.Linear):
            if len(shapes[cell.node]) != 2:
                return self.stop(user, "a dense layer over a map: choose a site behind it")
            return Reading(user, cell)
        if (activation := self.activation(user)) is not None and not self.rests_at_zero(user, activation):
            return self.stop(user, "it turns a silent signal into a constant: choose a site behind it")
        if is_batch_norm(leaf):
            inner = getattr(leaf, "act", None)
            known = inner is None or isinstance(inner, nn.Identity) or activation is not None
            return same if known else self.stop(user, "its activation has no rule: choose a site behind it")
        if isinstance(leaf, nn.modules.batchnorm._BatchNorm):
            return self.stop(user, "it has no running statistics, so that its outputs depend on the whole batch")
        if activation is not None:
            return same
        if name in ("pad", "ZeroPad2d", "constant_pad_nd"):
            return self._through_padding(cell, user)
        if keeps_channels(self.part, user):
            return same
        if name in RESHAPES and len(shapes[user]) == 2 and math.prod(shapes[cell.node][1:]) == shapes[user][1]:
            area = math.prod(shapes[cell.node][2:])
            return Cell(user, cell.channel * area, cell.repeat * area)
        if name in ("cat", "concat") and (before := _channels_ahead(cell.node, user, shapes)) is not None:
            return Cell(user, cell.channel + before, cell.repeat)
        if name in ("add", "iadd", "add_") and _same_channels(user, shapes):
            return same
        if name == "getitem" and _keeps_corner(user):
            return same
        if user in self.blocks and cell.node is self.blocks[user].squeezed:
            return same
        if name in ("mul", "imul"):
            return self.stop(user, "a gate would scale the signal: choose a site behind it")
        return self.stop(user, "add an op rule for it, or choose a site behind it")

    def activation(self, node: fx.Node) -> Activation | None:
        leaf = self.leaf(node)
        return built_in_activation(leaf) if is_batch_norm(leaf) else node_activation(self.part, node)

    def rests_at_zero(self, node: fx.Node, activation: Activation) -> bool:
        if node not in self._rests:
            self._rests[node] = activation.function(torch.zeros(1)).item() == 0
        return self._rests[node]

    def stop(self, node: fx.Node, advice: str) -> Stop:
        where = self.name(node) if node.op == "call_module" else node.name
        return Stop(where, operation(self.part, node), advice)

    def _through_padding(self, cell: Cell, user: fx.Node) -> Cell | Stop:
        before = self.padding(user)
        if before is None or any(before[1:]):
            return self.stop(user, "it moves position (0, 0): choose a site behind it")
        return Cell(user, cell.channel + before[0], cell.repeat)

    def padding(self, node: fx.Node) -> tuple[int, int, int] | None:
        """What a padding puts before the first channel, row and column; None if it can't be told."""
        leaf = self.leaf(node)
        sides: Any = (
            getattr(leaf, "padding", None) if leaf else node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
        )
        if not isinstance(sides, list | tuple) or not all(isinstance(n, int) and n >= 0 for n in sides):
            return None
        left = [*sides[::2], 0, 0, 0]
        return left[2], left[1], left[0]

    def norm_behind(self, node: fx.Node) -> fx.Node | None:
        """The batch norm that reads a layer, if nothing else does."""
        (only,) = node.users if len(node.users) == 1 else (None,)
        return only if only is not None and is_batch_norm(self.leaf(only)) else None

    def cuts(self, node: fx.Node) -> bool:
        """Whether everything from the input to the outputs passes this node."""
        reached = {n for n in self.part.graph.nodes if n.op == "placeholder"}
        for n in self.part.graph.nodes:
            if n is not node and n in self.shapes and any(a in reached for a in n.all_input_nodes):
                reached.add(n)
        (output,) = [n for n in self.part.graph.nodes if n.op == "output"]
        return not any(a in reached for a in output.all_input_nodes)

    def area(self, node: fx.Node) -> int:
        return math.prod(self.shapes[node][2:])

    def gain_of_area(self, node: fx.Node) -> float:
        """How many positions a pooled map has for each of its input."""
        source = node.all_input_nodes[0]
        return self.area(node) / self.area(source)

    def gain(self, cell: Cell) -> float:
        """What pooling leaves of a signal at one position."""
        name, leaf = operation(self.part, cell.node), self.leaf(cell.node)
        if name in _POOLS and "ax" not in name:
            return min(1.0, self.gain_of_area(cell.node))
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
    return all(i == slice(None) for i in index[:2]) and all(
        i.start in (None, 0) and (i.step or 1) > 0 for i in index[2:]
    )
