"""Op rules: who writes, scales and reads a channel.

The model is traced with `torch.fx` for analysis only; what is edited is always the original `nn.Module`.
Rules speak of nodes, not modules, because one module may be called several times (ResNet's one ReLU a block).
An op without a rule ends the walk with its name; nothing is guessed about it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as File
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stainlock.errors import ModelError
from stainlock.network.activations import Activation, activation_of_function, activation_of_module

# Modules whose inside is one operation to us, whatever package they come from (timm subclasses many).
_LEAVES = (nn.modules.conv._ConvNd, nn.Linear, _BatchNorm, nn.LayerNorm, nn.GroupNorm)

# Operations that leave every channel where it is and act on each of its values alone, or pool over space.
_KEEPING_MODULES = (
    nn.Identity, nn.Dropout, nn.Dropout2d, nn.MaxPool2d, nn.AvgPool2d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d,
)  # fmt: skip
_DROPPING_NAMES = {"dropout", "Dropout", "stochastic_depth", "StochasticDepth", "drop_path", "DropPath"}
_KEEPING_NAMES = {
    "dropout", "dropout2d", "stochastic_depth", "drop_path", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
    "adaptive_max_pool2d", "contiguous", "clone", "_assert",
}  # fmt: skip


class Tracer(fx.Tracer):
    """`fx.Tracer` that keeps layers whole even when a package subclasses them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, _LEAVES) or is_batch_norm(m) or _is_dynamic(m):
            return True
        return super().is_leaf_module(m, module_qualified_name)


def _is_dynamic(module: nn.Module) -> bool:
    """timm lists its own modules that trace wrongly because they look at shapes."""
    if not type(module).__module__.startswith("timm."):
        return False
    from timm.models._features_fx import is_notrace_module

    return bool(is_notrace_module(type(module)))


Path = tuple[str | Activation, ...]


@dataclass(frozen=True)
class Place:
    """Where the channel is: in a node's output, from ``offset`` on, ``repeat`` values wide; and how it got there."""

    node: fx.Node
    offset: int = 0
    repeat: int = 1
    path: Path = ()
    merged: bool = False
    tokens: bool = False  # channels are the last axis, as a dense layer leaves them, not the second


@dataclass(frozen=True)
class Reader:
    """A layer that reads the channel: channel k is its input ``offset + k·repeat … + repeat − 1``.

    ``path`` is what the channel passes on its way after the site's own activation, each acting on it alone: the names
    of batch norms and depthwise convolutions, and activations. ``merged`` says that something else was added to it.
    """

    module: str
    offset: int
    repeat: int
    path: Path = ()
    merged: bool = False

    def inputs(self, channel: int) -> list[int]:
        first = self.offset + channel * self.repeat
        return list(range(first, first + self.repeat))


@dataclass
class Channel:
    """What follows a site's output channels."""

    norm: str | None = None
    activation: Activation | None = None
    readers: list[Reader] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)  # why the walk ended where it did
    merges: list[str] = field(default_factory=list)  # additions on the way


@dataclass
class TracedPart:
    """One traced submodule: its name within the model, and its graph."""

    name: str
    module: nn.Module
    graph: fx.Graph

    def path(self, node: fx.Node) -> str:
        return ".".join(filter(None, (self.name, str(node.target))))

    def leaf(self, node: fx.Node) -> nn.Module:
        return self.module.get_submodule(str(node.target))


def trace(module: nn.Module, name: str = "") -> list[TracedPart]:
    """The module as one traced part or, where it does not trace, its largest submodules that do."""
    if isinstance(module, _LEAVES):
        return [TracedPart(name, module, _single_call())]
    try:
        return [TracedPart(name, module, Tracer().trace(module))]
    except Exception as error:  # a tracer runs arbitrary user code, which fails in arbitrary ways
        parts = []
        for child_name, child in module.named_children():
            if any(True for _ in child.parameters()):
                parts += trace(child, f"{name}.{child_name}" if name else child_name)
        if not parts and not name:
            raise ModelError(
                f"torch.fx can't trace {type(module).__name__} ({tracing_problem(module)}): name a submodule that"
                " traces with Target(part=...)"
            ) from error
        return parts


def tracing_problem(module: nn.Module) -> str | None:
    """Where a module stops tracing, by the operation in its own code; None if it traces."""
    try:
        Tracer().trace(module)
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_torchs(f.filename)]
        if not frames:
            return _one_line(error)
        return f"at `{frames[-1].line}` in {frames[-1].name}, {File(frames[-1].filename).name}: {_one_line(error)}"
    return None


def _is_torchs(file: str) -> bool:
    """Or ours; not what merely lies in a folder of such a name."""
    return any(File(file).is_relative_to(File(package).parent) for package in (torch.__file__, __file__))


def _single_call() -> fx.Graph:
    """The graph of a layer by itself, which tracing would look into."""
    graph = fx.Graph()
    graph.output(graph.call_module("", (graph.placeholder("x"),)))
    return graph


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def operation(part: TracedPart, node: fx.Node) -> str:
    """A readable name of what a node does."""
    if node.op == "call_module":
        return type(part.leaf(node)).__name__
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def node_activation(part: TracedPart, node: fx.Node) -> Activation | None:
    if node.op == "call_module":
        return activation_of_module(part.leaf(node))
    if node.op in ("call_function", "call_method"):
        return activation_of_function(node.target, node.args, dict(node.kwargs))
    return None


def keeps_channels(part: TracedPart, node: fx.Node) -> bool:
    """Whether channel k of the node's output is channel k of its input, pooled over space at most."""
    if node.op == "call_module":
        leaf = part.leaf(node)
        return isinstance(leaf, _KEEPING_MODULES) or type(leaf).__name__ in ("StochasticDepth", "DropPath")
    if operation(part, node) == "mean":
        return _spatial_mean(node)
    if operation(part, node) == "pad":
        sides = node.kwargs.get("pad", node.args[1] if len(node.args) > 1 else None)
        return isinstance(sides, list | tuple) and len(sides) <= 4  # rows and columns only
    return node.op in ("call_function", "call_method") and operation(part, node) in _KEEPING_NAMES


def _spatial_mean(node: fx.Node) -> bool:
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    dims = [dims] if isinstance(dims, int) else dims
    return isinstance(dims, list | tuple) and sorted(d % 4 for d in dims if isinstance(d, int)) == [2, 3]


def follow(part: TracedPart, site: fx.Node, shapes: dict[fx.Node, tuple[int, ...]]) -> Channel:
    """Walk forward from a site's output until every path ends at a reader, a merge or an op without a rule.

    The norm and activation are recorded only while the walk is on the site's single path: what two paths read
    before the activation is not silenced by it.
    """
    found = Channel()
    node, alone = site, True
    tokens = isinstance(part.leaf(site), nn.Linear) and len(shapes.get(site, ())) != 2
    while alone and len(node.users) == 1:
        (user,) = node.users
        leaf = part.leaf(user) if user.op == "call_module" else None
        if is_batch_norm(leaf) and found.norm is None and not tokens and not _acts_unknown(leaf):
            found.norm = part.path(user)
            found.activation = built_in_activation(leaf)
            alone = found.activation is None
        elif (activation := node_activation(part, user)) is not None:
            found.activation, alone = activation, False
        elif not (isinstance(leaf, nn.Identity) or operation(part, user) in _DROPPING_NAMES):
            break
        node = user
    pending = [Place(node, tokens=tokens)]
    seen: set[tuple[fx.Node, int]] = set()
    while pending:
        place = pending.pop()
        for user in place.node.users:
            ahead = [p for p in _step(part, place, user, shapes, found) if (p.node, p.offset) not in seen]
            seen.update((p.node, p.offset) for p in ahead)
            pending += ahead
    return found


def _step(
    part: TracedPart, place: Place, user: fx.Node, shapes: dict[fx.Node, tuple[int, ...]], found: Channel
) -> Iterator[Place]:
    """One user of the node: yields where the channel goes on, and records where it ends."""
    path, go = place.path, partial(replace, place, node=user)
    name = operation(part, user)
    leaf = part.leaf(user) if user.op == "call_module" else None
    if user.op == "output":
        found.stopped.append("the model's output")
    elif (activation := node_activation(part, user)) is not None:
        yield go(path=(*path, activation))
    elif isinstance(leaf, nn.Identity) or name in _DROPPING_NAMES:
        yield go()
    elif isinstance(leaf, nn.Linear) and (place.tokens or len(shapes.get(place.node, ())) == 2):
        found.readers.append(Reader(part.path(user), place.offset, place.repeat, path, place.merged))
    elif place.tokens:
        found.stopped.append(f"{name} at {user.name}")
    elif isinstance(leaf, nn.Conv2d) and leaf.groups == leaf.in_channels == leaf.out_channels:
        yield go(path=(*path, part.path(user)))
    elif isinstance(leaf, nn.Conv2d | nn.ConvTranspose2d):
        if getattr(leaf, "groups", 1) == 1:
            found.readers.append(Reader(part.path(user), place.offset, place.repeat, path, place.merged))
        else:
            found.stopped.append(f"grouped layer {part.path(user)}")
    elif is_batch_norm(leaf) and not _acts_unknown(leaf):
        built_in = built_in_activation(leaf)
        yield go(path=(*path, part.path(user), *((built_in,) if built_in else ())))
    elif keeps_channels(part, user):
        yield go()
    elif name in ("flatten", "Flatten") and _flattens_all(part, user, before := shapes.get(place.node, ())):
        area = math.prod(before[2:])
        yield go(offset=place.offset * area, repeat=place.repeat * area)
    elif name in ("cat", "concat") and (ahead := _channels_ahead(place.node, user, shapes)) is not None:
        yield go(offset=place.offset + ahead)
    elif name in ("mul", "imul") and (role := _role_in_product(place.node, user, shapes)) is not None:
        if role == "gate":
            found.stopped.append(f"the product {user.name} that it gates")
        else:
            yield go()
    elif name in ("add", "iadd") and _same_channels(user, shapes):
        found.merges.append(user.name)
        yield go(merged=True)
    else:
        found.stopped.append(f"{name} at {user.name}")


def _flattens_all(part: TracedPart, node: fx.Node, before: tuple[int, ...]) -> bool:
    """A map of channels and positions becomes one axis, channel after channel."""
    if node.op == "call_module":
        leaf = part.leaf(node)
        first, last = getattr(leaf, "start_dim", 1), getattr(leaf, "end_dim", -1)
    else:
        given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
        first, last = given.get("start_dim", 0), given.get("end_dim", -1)
    if len(before) not in (2, 4) or not isinstance(first, int) or not isinstance(last, int):
        return False
    return first % len(before) == 1 and last % len(before) == len(before) - 1


def _same_channels(user: fx.Node, shapes: dict[fx.Node, tuple[int, ...]]) -> bool:
    """A sum of maps with equal channels: channel k goes into channel k."""
    sizes = [shapes.get(a, ()) for a in user.args if isinstance(a, fx.Node)]
    return len(sizes) == 2 and all(len(size) == 4 for size in sizes) and sizes[0][1] == sizes[1][1]


def _channels_ahead(node: fx.Node, user: fx.Node, shapes: dict[fx.Node, tuple[int, ...]]) -> int | None:
    """How many channels a concatenation along axis 1 puts before the node's own."""
    tensors: Any = user.args[0] if user.args else user.kwargs.get("tensors")
    dim = user.kwargs.get("dim", user.args[1] if len(user.args) > 1 else 0)
    if dim != 1 or not isinstance(tensors, list | tuple) or list(tensors).count(node) != 1:
        return None
    before = [shapes.get(t) for t in tensors[: list(tensors).index(node)]]
    return None if None in before else sum(shape[1] for shape in before if shape)


def _role_in_product(node: fx.Node, user: fx.Node, shapes: dict[fx.Node, tuple[int, ...]]) -> str | None:
    """Whether the node is the ``gate`` or the ``gated`` map of a squeeze-and-excite product; None if it is neither."""
    factors = [a for a in user.args if isinstance(a, fx.Node)]
    if len(factors) != 2 or any(len(shapes.get(a, ())) != 4 for a in factors):
        return None
    other = factors[1] if factors[0] is node else factors[0]
    mine, theirs = shapes[node], shapes[other]
    if mine[1] != theirs[1]:
        return None
    return "gate" if mine[2] * mine[3] < theirs[2] * theirs[3] else "gated"


def is_batch_norm(module: nn.Module | None) -> bool:
    """Batch norm with fixed statistics, torchvision's frozen one included."""
    return (isinstance(module, _BatchNorm) or type(module).__name__ == "FrozenBatchNorm2d") and getattr(
        module, "running_var", None
    ) is not None


def built_in_activation(module: nn.Module | None) -> Activation | None:
    """timm's BatchNormAct2d carries its activation with it."""
    inner = getattr(module, "act", None)
    return activation_of_module(inner) if isinstance(inner, nn.Module) else None


def _acts_unknown(module: nn.Module | None) -> bool:
    inner = getattr(module, "act", None)
    return isinstance(inner, nn.Module) and not isinstance(inner, nn.Identity) and activation_of_module(inner) is None


def node_shapes(part: TracedPart, example: tuple[Any, ...]) -> dict[fx.Node, tuple[int, ...]]:
    """The shape of every node's output for one example input."""
    recorder = _ShapeRecorder(part)
    with torch.no_grad():
        recorder.run(*example)
    return recorder.shapes


class _ShapeRecorder(fx.Interpreter):
    def __init__(self, part: TracedPart) -> None:
        super().__init__(part.module, graph=part.graph)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.shapes[n] = tuple(value.shape)
        return value
