"""A model as a graph of operations, what each position of it sees, and where each channel goes.

**Tracing** is done by torch.fx or, if that fails, by recording one run. The graph is for analysis only; edits are made
to the original `nn.Module`. A module may be called several times (a ResNet block uses one ReLU in two places), so the
analysis is about nodes, not modules. fx runs the module's code on proxies, which modules may keep in caches, so it gets
a copy of the module that shares its tensors.

**Receptive fields** are computed node by node from the windows in `stainlock.network.ops`. An operation without a
window, or one that mixes all positions (attention, a pooled gate, a dense layer on a flattened map), is assumed to see
the whole input, which is always a valid bound. After a squeeze-and-excite block every position sees the whole image,
but far parts only through a few gates,

    y[c, i] = x[c, i] · s_c(mean over all positions of x).

If s is held at its value for one image, y[c, i] depends only on the pixels near i (`Near`), and a trigger can be
searched on a crop of the image. The trigger itself leads to other gates, so its response is measured in the whole
network.

**Channels** are followed from the layer that writes one to the layers that read it (`follow`). On its path a channel
passes batch norms, activations, pooling, depthwise convolutions, additions and concatenations. None of these mixes it
with other channels of the same map. At an operation without a rule the walk stops and records the reason.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from stainlock.errors import ModelError, UnsupportedOp
from stainlock.network.norms import is_batch_norm
from stainlock.network.ops import (
    POINT,
    TO_LAST,
    Activation,
    Kind,
    Window,
    axes_of,
    channels_are_last,
    is_activation,
    op_of,
)
from stainlock.network.recorder import DependsOnValues, Recorder
from stainlock.target import Target, copied, module_in

# --- tracing ----------------------------------------------------------------------------------------------------------

# Modules that count as one operation, including subclasses in other packages (timm has many).
_LEAVES = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
Shapes = dict[fx.Node, tuple[int, ...]]


class Tracer(fx.Tracer):
    """`fx.Tracer` that keeps layers whole even when a package subclasses them, and looks into wrappers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_layer(m) or (module_in(m) is None and super().is_leaf_module(m, module_qualified_name))


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, _LEAVES) or is_batch_norm(module) or is_activation(module)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module counts as one operation."""
    return Tracer().is_leaf_module(module, "") or isinstance(module, torch.jit.ScriptModule)


def _is_dynamic(module: nn.Module) -> bool:
    """True for modules that timm lists as not traceable by fx, because their code depends on shapes."""
    if not type(module).__module__.startswith("timm."):
        return False
    from timm.models._features_fx import is_notrace_module

    return bool(is_notrace_module(type(module)))


@dataclass
class TracedPart:
    """One traced submodule: its name within the model, its graph, and the shape of each node's output.

    - ``shapes``: the shape of each node's output tensor; empty if the part could not be run by itself.
    - ``sizes``: the nodes whose output contains no tensor: sizes, types, assertions. Empty as well in that case.
    - ``rules``, ``last``: caches of what `stainlock.network.ops` found out about each node.
    - ``leaves``: cache of the modules that nodes call.
    - ``runs``: whether the graph can be run on other inputs. A recorded one can't, since it holds the example's sizes.
    - ``traced``: the copy that fx traced, which holds the constants fx added.
    """

    name: str
    module: nn.Module
    graph: fx.Graph
    shapes: Shapes = field(default_factory=dict)
    sizes: set[fx.Node] = field(default_factory=set)
    rules: dict[fx.Node, Any] = field(default_factory=dict)
    last: dict[fx.Node, bool] = field(default_factory=dict)
    leaves: dict[str, nn.Module] = field(default_factory=dict)
    runs: bool = True
    traced: nn.Module | None = None

    @cached_property
    def rank(self) -> int:
        """How many axes a map has, including the batch: four for images, five for video."""
        image = next((self.shapes[n] for n in self.graph.nodes if n.op == "placeholder" and n in self.shapes), ())
        return len(image) if len(image) == 5 else 4

    def path(self, node: fx.Node) -> str:
        """The full name in the model of the module that a node calls."""
        return ".".join(filter(None, (self.name, str(node.target))))

    def leaf(self, node: fx.Node) -> nn.Module:
        name = str(node.target)
        if name not in self.leaves:
            self.leaves[name] = self.module.get_submodule(name)
        return self.leaves[name]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose tensors are inputs of a node."""
        return [n for n in node.all_input_nodes if n not in self.sizes]

    def operation(self, node: fx.Node) -> str:
        """A readable name of a node's operation."""
        if node.op == "call_module":
            return type(self.leaf(node)).__name__
        return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))

    def run(self, example: tuple[Any, ...]) -> None:
        """Record the shape of every node's output for one example input."""
        recorder = _Recorder(self)
        with torch.no_grad():
            recorder.run(*example)


class _Recorder(fx.Interpreter):
    def __init__(self, part: TracedPart) -> None:
        super().__init__(part.traced or part.module, graph=part.graph)
        self.part = part

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.part.shapes[n] = tuple(value.shape)
        elif not _holds_tensors(value):
            self.part.sizes.add(n)
        return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (
        isinstance(value, list | tuple) and any(_holds_tensors(item) for item in value)
    )


def trace(module: nn.Module, name: str = "", example: tuple[Any, ...] | None = None) -> list[TracedPart]:
    """The module as one traced part or, if it does not trace, its largest submodules that do.

    With an ``example`` of its inputs, shapes are recorded too, and a module that fx can't trace is recorded.
    """
    if isinstance(module, _LEAVES):
        part = TracedPart(name, module, _single_call())
    else:
        try:
            if example is not None and any(_is_dynamic(m) and not is_leaf(m) for m in module.modules()):
                return [_recorded(module, name, example)]
            own = _sharing_tensors(module)
            part = TracedPart(name, module, Tracer().trace(own), traced=own)
        except Exception as error:  # a tracer runs arbitrary user code, which can fail in any way
            if example is not None:
                with suppress(DependsOnValues):
                    return [_recorded(module, name, example)]
            return _traced_parts(module, name, error)
    if example is not None:
        part.run(example)
    return [part]


def _recorded(module: nn.Module, name: str, example: tuple[Any, ...]) -> TracedPart:
    recorder = Recorder(module, is_leaf)
    graph = recorder.record(*example)
    return TracedPart(name, module, graph, recorder.shapes, runs=False)


def _traced_parts(module: nn.Module, name: str, error: Exception) -> list[TracedPart]:
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


def _sharing_tensors(module: nn.Module) -> nn.Module:
    """A copy of a module's structure and attributes around the same parameters and buffers.

    Wrappers inside, which distribute or compile, only call the module that they hold.
    """
    return _seen_through(copied(module, [*module.parameters(), *module.buffers()]))


class _Caller(nn.Module):
    """Calls the module in a wrapper, under the same name."""

    def __init__(self, wrapper: nn.Module) -> None:
        super().__init__()
        self._modules.update(wrapper._modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (inner,) = self.children()
        return inner(*args, **kwargs)


def _seen_through(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        module._modules[name] = _seen_through(child)
    return module if module_in(module) is None else _Caller(module)


def tracing_problem(module: nn.Module) -> str | None:
    """The line of a module's own code at which tracing fails, and the error; None if it traces."""
    try:
        Tracer().trace(_sharing_tensors(module))
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library_code(f.filename)]
        if not frames:
            return _one_line(error)
        return f"at `{frames[-1].line}` in {frames[-1].name}, {Path(frames[-1].filename).name}: {_one_line(error)}"
    return None


def _is_library_code(file: str) -> bool:
    """True for files of torch or of this library, but not for others in folders that happen to have such a name."""
    ours = Path(__file__).parents[1]
    return any(Path(file).is_relative_to(package) for package in (Path(torch.__file__).parent, ours))


def _single_call() -> fx.Graph:
    """The graph that calls a layer as a whole; tracing the layer would look inside it."""
    graph = fx.Graph()
    graph.output(graph.call_module("", (graph.placeholder("x"),)))
    return graph


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


# --- receptive fields -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Along one axis, position i sees pixels ``start + jump·i … start + jump·i + size − 1``."""

    size: int = 1
    jump: int = 1
    start: int = 0

    def through(self, kernel: int, stride: int, padding: int, dilation: int = 1) -> Axis:
        return Axis(
            self.size + (kernel - 1) * dilation * self.jump,
            self.jump * stride,
            self.start - padding * self.jump,
        )

    def interval(self, position: int, pixels: int) -> tuple[int, int]:
        """First pixel and one past the last that the position sees, clipped to the input."""
        first = self.start + self.jump * position
        return max(first, 0), min(first + self.size, pixels)


Field = tuple[Axis, ...]  # vertical and horizontal, preceded by time for video


def receptive_fields(part: TracedPart, constant: Collection[fx.Node] = ()) -> dict[fx.Node, Field | None]:
    """The field of every node whose output depends on the image; None means the whole input. ``constant`` nodes are
    taken not to depend on it."""
    image = next(iter(part.graph.nodes))
    fields: dict[fx.Node, Field | None] = {image: (Axis(),) * (part.rank - 2)}
    for node in part.graph.nodes:
        sources = [n for n in part.sources(node) if n in fields]
        if node is image or node.op in ("placeholder", "get_attr") or node in part.sizes or not sources:
            continue
        if node in constant:
            continue
        fields[node] = _field(part, node, sources, [fields[n] for n in sources])
    return fields


def _field(part: TracedPart, node: fx.Node, sources: list[fx.Node], seen: list[Field | None]) -> Field | None:
    known = [field for field in seen if field is not None]
    op = op_of(part, node)
    window = op.window()
    if len(known) < len(seen) or window is None or len(part.shapes.get(node, ())) != part.rank:
        return None
    maps = [n for n in sources if len(part.shapes.get(n, ())) == part.rank]
    last = {channels_are_last(part, n) for n in maps}
    if last == {True, False} or (last == {True} and (window != POINT or not op.rule.anywhere)):
        return None
    if op.kind is Kind.PERMUTE and channels_are_last(part, node) in last:  # does not switch between the two layouts
        return None
    if window != POINT or len(known) == 1:
        # A factor of one position, such as a pooled gate, is broadcast: the positions are not those of the source.
        same = window != POINT or _size(part, node) == _size(part, sources[0])
        return _through(known[0], window) if same and len(known) == 1 else None
    return _union(known) if len({_size(part, n) for n in (node, *maps)}) == 1 else None


def _size(part: TracedPart, node: fx.Node) -> tuple[int, ...]:
    """The shape of a map's positions."""
    shape = part.shapes.get(node, ())
    return shape[1:-1] if channels_are_last(part, node) else shape[2:]


def _through(source: Field, window: Window) -> Field:
    if window == POINT:
        return source
    return tuple(
        axis.through(*numbers)
        for axis, *numbers in zip(source, window.kernel, window.stride, window.padding, window.dilation, strict=True)
    )


def _union(sources: list[Field]) -> Field | None:
    merged = []
    for axes in zip(*sources, strict=True):
        if len({axis.jump for axis in axes}) > 1:
            return None
        start = min(axis.start for axis in axes)
        merged.append(Axis(max(axis.start + axis.size for axis in axes) - start, axes[0].jump, start))
    return tuple(merged)


# --- with gates held constant -----------------------------------------------------------------------------------------

Gates = dict[fx.Node, Tensor]


@dataclass(frozen=True, eq=False)
class Near:
    """The field of a site's layer with gates held constant, and the graph to run with them."""

    part: TracedPart
    node: fx.Node
    pooled: frozenset[fx.Node]
    field: Field

    def open_input(self, target: Target, pixels: Tensor) -> tuple[Tensor, Gates]:
        """The layer's input for whole images, and the values to hold: the maps pooled to one position."""
        with torch.no_grad():
            values = self._run(target.normalise(pixels), {})
        return self._given(values), {node: values[node] for node in self.pooled if node in values}

    def layer_input(self, target: Target, pixels: Tensor, gates: Gates) -> Tensor:
        """The layer's input for crops of images, with gates held at given values."""
        held = {node: value.expand(len(pixels), *value.shape[1:]) for node, value in gates.items()}
        return self._given(self._run(target.normalise(pixels), held))

    def _given(self, values: Mapping[fx.Node, Any]) -> Tensor:
        given = values[self.part.sources(self.node)[0]]
        assert isinstance(given, Tensor)
        return given

    def _run(self, image: Tensor, held: Gates) -> dict[fx.Node, Any]:
        """Run the graph up to the layer, without the nodes that only the held gates need.

        `fx.Interpreter` does the same, but takes longer for each node than a small layer does.
        """
        module = self.part.traced or self.part.module
        values: dict[fx.Node, Any] = dict(held)
        for node in self._needed(frozenset(held)):
            given: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = given
            match node.op:
                case "placeholder":
                    values[node] = image
                case "get_attr":
                    values[node] = attrgetter(str(node.target))(module)
                case "call_module":
                    values[node] = attrgetter(str(node.target))(module)(*args, **kwargs)
                case "call_method":
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                case _:
                    assert callable(node.target)
                    values[node] = node.target(*args, **kwargs)
        return values

    def _needed(self, held: frozenset[fx.Node]) -> list[fx.Node]:
        if held not in self._orders:
            needed, ahead = set(held), [*self.part.sources(self.node)]
            while ahead:
                node = ahead.pop()
                if node not in needed:
                    needed.add(node)
                    ahead += node.all_input_nodes
            self._orders[held] = [n for n in self.part.graph.nodes if n in needed and n not in held]
        return self._orders[held]

    @cached_property
    def _orders(self) -> dict[frozenset[fx.Node], list[fx.Node]]:
        return {}


def near_fields(part: TracedPart) -> tuple[frozenset[fx.Node], dict[fx.Node, Field | None]]:
    """The nodes that pool a map to one position, and all fields with these held constant."""
    pooled = frozenset(node for node in part.graph.nodes if _is_pooled(part, node))
    return pooled, receptive_fields(part, pooled) if pooled else {}


def _is_pooled(part: TracedPart, node: fx.Node) -> bool:
    if op_of(part, node).kind is not Kind.SPATIAL:
        return False
    after, before = (part.shapes.get(n, ())[2:] for n in (node, part.sources(node)[0]))
    return math.prod(after) == 1 < math.prod(before)


# --- following a channel ----------------------------------------------------------------------------------------------


class Reason(Enum):
    """Why a channel can't be followed any further; for locks, with what to do about it."""

    RETURNED = "the model returns the channel itself: choose another site"
    GATES = "it gates a product: choose another site"
    MIXED = "it scales the channel depending on others: choose a site after it"
    GROUPED = "a grouped convolution keeps the signal within its group: choose a site after it"
    SHARED = "its weights are used in several places: choose a site after it"
    CORNER_UNSEEN = "its kernel does not reach position (0, 0): choose a site after it"
    CORNER_MOVED = "it moves position (0, 0): choose a site after it"
    OVER_A_MAP = "a dense layer over a map: choose a site after it"
    NOT_SILENT = "it turns a silent signal into a constant: choose a site after it"
    ACTIVATION_UNKNOWN = "its activation has no rule: choose a site after it"
    NO_STATISTICS = "it has no running statistics, so its outputs depend on the whole batch"
    GATED = "a gate would scale the signal: choose a site after it"
    ADDED_TO_ITSELF = "the signal would be added to itself: choose a site after it"
    CANT_BE_SILENCED = "what it adds to the signal can't be silenced: choose a site after it"
    UNREAD = "nothing reads it"
    UNKNOWN = "add an op rule for it, or choose a site after it"


@dataclass(frozen=True)
class Stop:
    """Where a channel can't be followed: the node, its operation, and why."""

    node: str
    op: str
    reason: Reason

    def error(self) -> UnsupportedOp:
        return UnsupportedOp(self.node, self.op, self.reason.value)

    def __str__(self) -> str:
        match self.reason:
            case Reason.RETURNED:
                return "the model's output"
            case Reason.GATES:
                return f"the product {self.node} that it gates"
            case Reason.GROUPED:
                return f"grouped layer {self.node}"
            case Reason.SHARED:
                return f"{self.node}, which other layers use too"
        return f"{self.op} at {self.node}"


def stop_at(part: TracedPart, node: fx.Node, reason: Reason) -> Stop:
    where = part.path(node) if node.op == "call_module" else node.name
    return Stop(where, part.operation(node), reason)


@dataclass(frozen=True)
class Passed:
    """A batch norm or depthwise convolution on a channel's path; channel k of the site is its channel offset + k."""

    module: str
    offset: int = 0


Steps = tuple[Passed | Activation, ...]


@dataclass(frozen=True)
class Reader:
    """A layer that reads the channel: channel k is its input ``offset + k·repeat … + repeat − 1``.

    ``path`` lists the operations between the site's own activation and the reader, each of which acts on the channel
    alone. ``merged`` says that something else was added to the channel.
    """

    module: str
    offset: int
    repeat: int
    path: Steps = ()
    merged: bool = False

    def inputs(self, channel: int) -> list[int]:
        first = self.offset + channel * self.repeat
        return list(range(first, first + self.repeat))

    @property
    def modules(self) -> list[str]:
        """The names of the modules on the path, and the reader's own."""
        return [*(step.module for step in self.path if isinstance(step, Passed)), self.module]


@dataclass
class Followers:
    """What follows a site's output channels: a batch norm, an activation, and the layers that read them."""

    norm: str | None = None
    activation: Activation | None = None
    readers: list[Reader] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)  # additions on the path


@dataclass(frozen=True)
class _Place:
    """Where the site's channels are: in a node's output, starting at ``offset``, each ``repeat`` values wide."""

    node: fx.Node
    offset: int = 0
    repeat: int = 1
    path: Steps = ()
    merged: bool = False
    tokens: bool = False  # channels are on the last axis, as after a Linear layer, instead of the second


def follow(part: TracedPart, site: fx.Node) -> Followers:
    """Walk forward from a site's output until every path ends at a reader or a stop.

    The site's norm and activation are recorded only while there is a single path: an activation on one of two paths
    does not silence what the other reads.
    """
    found = Followers()
    node, alone, shuffled = site, True, False
    tokens = isinstance(part.leaf(site), nn.Linear) and len(part.shapes.get(site, ())) != 2
    while alone and len(node.users) == 1:
        (user,) = node.users
        op = op_of(part, user)
        if op.kind is Kind.NORM and found.norm is None and not (tokens or shuffled):
            found.norm, found.activation = part.path(user), op.activation
            alone = found.activation is None
        elif op.kind is Kind.ACTIVATION:
            found.activation, alone = op.activation, False
        elif op.kind is Kind.PERMUTE and _moves(part, user, tokens=tokens):
            tokens = not tokens
        elif op.kind is Kind.SHUFFLE and not tokens and found.norm is None:
            shuffled = True  # the activation after it acts on each value, wherever that is moved
        elif op.kind is not Kind.NOTHING:
            break
        node = user
    if shuffled:  # a channel is now part of a wider one, which readers share with others: no reader is recorded
        reasons = {Kind.OUTPUT: Reason.RETURNED, Kind.PRODUCT: Reason.GATES, Kind.MIXING: Reason.MIXED}
        users = [(user, op_of(part, user).kind) for user in node.users]
        found.stops += [stop_at(part, u, reasons.get(k, Reason.UNKNOWN)) for u, k in users if k is not Kind.SIZE]
        return found
    pending = [_Place(node, tokens=tokens)]
    seen: set[tuple[fx.Node, int]] = set()
    while pending:
        place = pending.pop()
        for user in place.node.users:
            ahead = [p for p in _step(part, place, user, found) if (p.node, p.offset) not in seen]
            seen.update((p.node, p.offset) for p in ahead)
            pending += ahead
    return found


def _step(part: TracedPart, place: _Place, user: fx.Node, found: Followers) -> Iterator[_Place]:
    """Look at one user of the node: yield where the channels continue, and record where they end."""
    op = op_of(part, user)
    here = replace(place, node=user)
    passed = Passed(part.path(user), place.offset) if op.kind in (Kind.NORM, Kind.DEPTHWISE) else None
    activated = () if op.activation is None else (op.activation,)
    if op.kind is Kind.SIZE:
        return
    if op.kind is Kind.OUTPUT:
        found.stops.append(stop_at(part, user, Reason.RETURNED))
    elif op.kind is Kind.ACTIVATION:
        yield replace(here, path=(*place.path, *activated))
    elif op.kind is Kind.NOTHING:
        yield here
    elif op.kind is Kind.PERMUTE and _moves(part, user, tokens=place.tokens):
        yield replace(here, tokens=not place.tokens)
    elif op.kind is Kind.MIXING:
        found.stops.append(stop_at(part, user, Reason.MIXED))
    elif op.kind is Kind.DENSE and _reads(part, place, user):
        found.readers.append(Reader(part.path(user), place.offset, place.repeat, place.path, place.merged))
    elif place.tokens or op.kind in (Kind.DENSE, Kind.UNKNOWN, Kind.PERMUTE):
        found.stops.append(stop_at(part, user, Reason.UNKNOWN))
    elif op.kind is Kind.GROUPED:
        found.stops.append(stop_at(part, user, Reason.GROUPED))
    elif passed is not None:
        yield replace(here, path=(*place.path, passed, *activated))
    elif (span := op.span(place.node)) is not None:
        if op.kind is Kind.SUM:
            found.merges.append(user.name)
        yield replace(
            here, offset=place.offset * span.repeat + span.offset, repeat=place.repeat * span.repeat,
            merged=place.merged or op.kind is Kind.SUM,
        )  # fmt: skip
    else:
        found.stops.append(stop_at(part, user, Reason.GATES if op.kind is Kind.PRODUCT else Reason.UNKNOWN))


def _moves(part: TracedPart, node: fx.Node, *, tokens: bool) -> bool:
    """Whether a permutation moves channels from the axis they are on to the other one."""
    return (axes_of(part, node) == TO_LAST) is not tokens


def _reads(part: TracedPart, place: _Place, layer: fx.Node) -> bool:
    """A Linear layer reads channels from the last axis, a convolution from a map's second axis."""
    if isinstance(part.leaf(layer), nn.Linear):
        return place.tokens or len(part.shapes.get(place.node, ())) == 2
    return not place.tokens
