"""What each operation does to a channel, in one table that stains, locks, certificates and attacks share.

A map has its channels on the second axis and its positions on the axes after it: rows and columns, preceded by frames
for video. Between two permutations channels may be on the last axis (`channels_are_last`). Each row of `TABLE` says for
one operation:

- ``span``: where channel 0 of a source is in the output, and how many values wide; the other channels follow;
- ``window``: which positions of its source an output position sees (kernel, stride, padding, dilation);
- ``anywhere``: whether it acts on each position by itself, whichever axis the channels are on; the windows of others
  assume that they are on the second;
- ``keeps_sign``: whether maps without negative values give a map without negative values;
- ``moments``: mean and standard deviation of the output's channels, from those of the sources.

Activations have a table of their own, `ACTIVATIONS`: below which input each is silent, and where it saturates.

An operation without a row is `Kind.UNKNOWN`: nothing is guessed about it, and channels are not followed through it.
To support a new operation, add a row. tests/network changes a channel and checks what actually changes after each
operation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.utils import _pair, _triple

from stainlock.network.norms import affine_of, is_batch_norm

if TYPE_CHECKING:
    from stainlock.network.graph import TracedPart

# --- activations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """What a detector needs to know about the activation after it.

    For pre-activations below ``silent_below`` the output is ``rest`` plus ``leak`` times the pre-activation, to within
    ``residue``. For those above ``ceiling`` it no longer grows. ``inverse`` gives the pre-activation for an output, for
    those that serve as gates.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    silent_below: float
    rest: float = 0.0
    residue: float = 0.0
    leak: float = 0.0
    ceiling: float = math.inf
    inverse: Callable[[Tensor], Tensor] | None = None

    @property
    def silences(self) -> bool:
        return self.leak == 0.0

    @property
    def cuts_off(self) -> bool:
        """Exactly 0 below 0, and the pre-activation itself from there to the ceiling."""
        return self.silent_below == 0.0 and self.silences

    @property
    def commutes_with_factors(self) -> bool:
        """f(a·x) = a·f(x) for every a > 0."""
        return self.silent_below == 0.0 and self.ceiling == math.inf

    @property
    def is_relu(self) -> bool:
        return self.cuts_off and self.commutes_with_factors

    @property
    def is_gate(self) -> bool:
        """One that squeeze-and-excite blocks multiply channels by: it can be 0, and is bounded."""
        return self.inverse is not None

    @property
    def is_for_hidden_units(self) -> bool:
        """One that squeeze-and-excite blocks have between their two layers: 0 at 0, and unbounded."""
        return self.name in ("relu", "silu", "gelu", "hardswish")

    @property
    def never_negative(self) -> bool:
        return self.name in ("relu", "relu6", "sigmoid", "hardsigmoid", "softplus")

    @property
    def keeps_zero(self) -> bool:
        return float(self.function(torch.zeros(1))) == 0.0


ACTIVATIONS = {
    "relu": Activation("relu", F.relu, 0.0),
    "relu6": Activation("relu6", F.relu6, 0.0, ceiling=6.0),
    "hardswish": Activation("hardswish", F.hardswish, -3.0),
    "hardsigmoid": Activation("hardsigmoid", F.hardsigmoid, -3.0, ceiling=3.0, inverse=lambda g: 6 * g - 3),
    "gelu": Activation("gelu", F.gelu, -4.0, residue=2e-4),
    "quick_gelu": Activation("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x), -6.0, residue=3e-4),
    "silu": Activation("silu", F.silu, -10.0, residue=5e-4),
    "mish": Activation("mish", F.mish, -10.0, residue=5e-4),
    "sigmoid": Activation("sigmoid", torch.sigmoid, -10.0, residue=5e-5, ceiling=10.0, inverse=torch.logit),
    "softplus": Activation("softplus", F.softplus, -10.0, residue=5e-5),
    "tanh": Activation("tanh", torch.tanh, -6.0, rest=-1.0, residue=2e-5, ceiling=6.0, inverse=torch.atanh),
    "elu": Activation("elu", F.elu, -10.0, rest=-1.0, residue=5e-5),
    "selu": Activation("selu", F.selu, -10.0, rest=-1.7580993408473766, residue=1e-4),
    "celu": Activation("celu", F.celu, -10.0, rest=-1.0, residue=5e-5),
}

_ACTIVATION_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Sigmoid: "sigmoid",
    nn.Softplus: "softplus",
    nn.Tanh: "tanh",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
}

# Other packages have their own classes for these functions. Classes with such names are recognised by their values.
_OTHER_NAMES = re.compile("relu|gelu|silu|swish|mish|sigmoid|tanh", re.IGNORECASE)
_VARIANTS: dict[str, list[Callable[[Tensor], Tensor]]] = {"gelu": [partial(F.gelu, approximate="tanh")]}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_known: dict[tuple[type[nn.Module], tuple[tuple[str, str], ...]], str | None] = {}
_SAMPLE = torch.linspace(-8, 8, 120, dtype=torch.float64).view(2, 3, 4, 5)


def leaky_relu(slope: float) -> Activation:
    return Activation("leaky_relu", lambda x: F.leaky_relu(x, slope), 0.0, leak=slope)


def activation_of_module(module: nn.Module) -> Activation | None:
    """The activation a leaf module computes, or None if it is not a known one."""
    if isinstance(module, nn.LeakyReLU):
        return leaky_relu(float(module.negative_slope))
    name = _ACTIVATION_MODULES.get(type(module)) or _recognised(module)
    if name in ("elu", "celu") and getattr(module, "alpha", 1.0) != 1.0:
        return None
    if name == "softplus" and getattr(module, "beta", 1.0) != 1.0:
        return None
    return ACTIVATIONS[name] if name else None


def is_activation(module: nn.Module) -> bool:
    return activation_of_module(module) is not None


def clipping_range(module: nn.Module) -> tuple[float, float] | None:
    """The range outside which a module clips values, and so passes no gradient; None if it does not clip."""
    if isinstance(module, nn.Hardtanh):  # ReLU6 is one, too
        return module.min_val, module.max_val
    return (0.0, math.inf) if isinstance(module, nn.ReLU) else None


def _recognised(module: nn.Module) -> str | None:
    """The activation that another package's class computes, recognised by its values; None if there is none."""
    if type(module).__module__.startswith("torch.") or not _OTHER_NAMES.search(type(module).__name__):
        return None
    if any(module.children()) or module.state_dict():
        return None
    settings = tuple((name, repr(value)) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    if (type(module), settings) not in _known:
        _known[type(module), settings] = _compared(module)
    return _known[type(module), settings]


def _compared(module: nn.Module) -> str | None:
    try:
        with torch.no_grad():
            values = module.forward(_SAMPLE.clone())  # not called as a module, which fx would trace
        if values.shape != _SAMPLE.shape:
            return None
    except Exception:  # another package's code, which may take other arguments
        return None
    functions = ((name, f) for name, own in ACTIVATIONS.items() for f in (own.function, *_VARIANTS.get(name, [])))
    return next((name for name, f in functions if torch.allclose(f(_SAMPLE), values, rtol=0, atol=1e-6)), None)


def activation_of_function(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Activation | None:
    """The activation a function or tensor method computes, or None; ``function`` may be a method's name."""
    name = (function if isinstance(function, str) else getattr(function, "__name__", "")).rstrip("_")
    if name == "leaky_relu":
        slope = keywords.get("negative_slope", arguments[1] if len(arguments) > 1 else 0.01)
        return leaky_relu(float(slope))
    shaped = len(arguments) > 1 or any(keywords.get(k, 1.0) != 1.0 for k in ("alpha", "beta"))
    if name in ("elu", "celu", "softplus") and shaped:
        return None  # with arguments other than the defaults they are different functions
    return ACTIVATIONS.get(name)


# --- operations -------------------------------------------------------------------------------------------------------

Moments = tuple[Tensor, Tensor]  # mean and standard deviation of every channel
Sides = tuple[int, ...]  # one number for each axis of positions


class Kind(Enum):
    """What an operation does to the channels of its input."""

    OUTPUT = "returns them"
    SIZE = "uses only their sizes"
    DENSE = "mixes all of them"
    GROUPED = "mixes those of each group"
    DEPTHWISE = "filters each by itself"
    NORM = "scales and shifts each by itself"
    ACTIVATION = "applies a function to each value"
    NOTHING = "changes nothing at inference"
    SPATIAL = "pools each over positions"
    PAD = "adds positions or channels of zeros"
    FLATTEN = "flattens the positions of each into consecutive values"
    SHUFFLE = "interleaves the positions of several into one channel"
    UNSHUFFLE = "turns neighbouring positions of each into consecutive channels"
    JOIN = "concatenates them"
    SUM = "adds maps, channel by channel"
    PRODUCT = "multiplies maps, channel by channel"
    MIXING = "scales each depending on the others"
    PERMUTE = "moves them to another axis"
    SLICE = "leaves out positions"
    UNKNOWN = "has no rule"


# Kinds with one source that pass each channel on by itself, under the same index.
KEEPING = {Kind.NOTHING, Kind.SPATIAL, Kind.SLICE}


@dataclass(frozen=True)
class Span:
    """Where a source's channels are in the output: channel k starts at offset + k·repeat and is repeat values wide."""

    offset: int = 0
    repeat: int = 1


@dataclass(frozen=True)
class Window:
    """Output position i sees ``kernel`` input positions, starting at stride·i − padding and ``dilation`` apart."""

    kernel: Sides = (1, 1)
    stride: Sides = (1, 1)
    padding: Sides = (0, 0)
    dilation: Sides = (1, 1)


SAME, POINT = Span(), Window()


@dataclass(frozen=True)
class Rule:
    """One row of the table. It applies to a node that calls one of ``modules``, or a function, method or other
    package's module with one of ``names``, and whose arguments pass ``fits``."""

    kind: Kind
    modules: tuple[type[nn.Module], ...] = ()
    names: frozenset[str] = frozenset()
    fits: Callable[[TracedPart, fx.Node], bool] = lambda part, node: True
    span: Callable[[TracedPart, fx.Node, fx.Node], Span | None] = lambda part, node, source: None
    window: Callable[[TracedPart, fx.Node], Window | None] = lambda part, node: None
    anywhere: bool = False
    keeps_sign: bool = False
    moments: Callable[[TracedPart, fx.Node, list[Moments]], Moments | None] = lambda part, node, sources: None


@dataclass(frozen=True)
class Op:
    """What one node does: the row of the table that applies, bound to the node."""

    part: TracedPart
    node: fx.Node
    rule: Rule
    activation: Activation | None = field(default=None)  # the node's own, or the one built into a batch norm

    @property
    def kind(self) -> Kind:
        return self.rule.kind

    def span(self, source: fx.Node) -> Span | None:
        return self.rule.span(self.part, self.node, source)

    def window(self) -> Window | None:
        return self.rule.window(self.part, self.node)

    def moments(self, sources: list[Moments]) -> Moments | None:
        return self.rule.moments(self.part, self.node, sources)


def op_of(part: TracedPart, node: fx.Node) -> Op:
    """What a node does; `Kind.UNKNOWN` if the table has no row for it."""
    found = part.rules.get(node)
    if found is None:
        found = part.rules[node] = _classified(part, node)
    assert isinstance(found, Op)
    return found


def _classified(part: TracedPart, node: fx.Node) -> Op:
    if node.op == "output":
        return Op(part, node, Rule(Kind.OUTPUT))
    if node in part.sizes:
        return Op(part, node, Rule(Kind.SIZE))
    leaf = part.leaf(node) if node.op == "call_module" else None
    if node.op not in ("call_module", "call_function", "call_method"):  # an attribute may have an operation's name
        return Op(part, node, Rule(Kind.UNKNOWN))
    if is_batch_norm(leaf):
        own, inner = built_in_activation(leaf), getattr(leaf, "act", None)
        known = own is not None or inner is None or isinstance(inner, nn.Identity)
        return Op(part, node, NORM if known else Rule(Kind.UNKNOWN, window=_point), own)
    activation = (
        activation_of_module(leaf)
        if leaf is not None
        else activation_of_function(node.target, node.args, dict(node.kwargs))
    )
    if activation is not None:
        return Op(part, node, ACTIVATION, activation)
    name = canonical(part.operation(node))
    for rule in TABLE:
        matches = isinstance(leaf, rule.modules) or name in rule.names
        if matches and rule.fits(part, node):
            return Op(part, node, rule)
    return Op(part, node, Rule(Kind.UNKNOWN))


def built_in_activation(norm: nn.Module | None) -> Activation | None:
    """The activation built into a norm such as timm's BatchNormAct2d."""
    inner = getattr(norm, "act", None)
    return activation_of_module(inner) if isinstance(inner, nn.Module) else None


_SAME_NAME = {"iadd": "add", "imul": "mul", "isub": "sub", "itruediv": "truediv", "div": "truediv",
              "concat": "cat", "concatenate": "cat", "constant_pad_nd": "pad", "ZeroPad2d": "pad",
              "Flatten": "flatten", "view": "flatten", "reshape": "flatten"}  # fmt: skip


def canonical(name: str) -> str:
    """One name for an operation, its in-place form and its aliases."""
    name = name.rstrip("_")
    return _SAME_NAME.get(name, name)


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument of a function or method, passed by position or by name."""
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else default)


# --- where channels are -----------------------------------------------------------------------------------------------

TO_LAST, TO_SECOND = (0, 2, 3, 1), (0, 3, 1, 2)


def axes_of(part: TracedPart, node: fx.Node) -> tuple[int, ...]:
    """The order of axes of a permutation: a method, a function, or torchvision's module."""
    given: Any = part.leaf(node).dims if node.op == "call_module" else argument(node, 1, "dims")
    axes = given if isinstance(given, list | tuple) else node.args[1:]
    return tuple(d % 4 if isinstance(d, int) else -1 for d in axes)


def channels_are_last(part: TracedPart, node: fx.Node) -> bool:
    """Whether a map has its channels on the last axis, after its positions."""
    if not part.last and part.shapes:
        for each in part.graph.nodes:
            moved = op_of(part, each).kind is Kind.PERMUTE
            mapped = len(part.shapes.get(each, ())) == 4
            part.last[each] = mapped and (
                axes_of(part, each) == TO_LAST if moved else any(part.last.get(n, False) for n in part.sources(each))
            )
    return part.last.get(node, False)


# --- where channels go ------------------------------------------------------------------------------------------------


def _same(part: TracedPart, node: fx.Node, source: fx.Node) -> Span:
    return SAME


def _padded(part: TracedPart, node: fx.Node, source: fx.Node) -> Span | None:
    before = padding_of(part, node)
    return None if before is None else Span(before[0])


def _flattened(part: TracedPart, node: fx.Node, source: fx.Node) -> Span:
    return Span(0, math.prod(part.shapes[source][2:]))


def _unshuffled(part: TracedPart, node: fx.Node, source: fx.Node) -> Span:
    return Span(0, part.shapes[node][1] // part.shapes[source][1])


def _joined(part: TracedPart, node: fx.Node, source: fx.Node) -> Span | None:
    """The offset is the number of channels that a concatenation puts before the source's."""
    tensors = argument(node, 0, "tensors")
    if not isinstance(tensors, list | tuple) or list(tensors).count(source) != 1:
        return None
    before = [part.shapes.get(t) for t in tensors[: list(tensors).index(source)]]
    return None if None in before else Span(sum(shape[1] for shape in before if shape))


def _gated(part: TracedPart, node: fx.Node, source: fx.Node) -> Span | None:
    """Channels of the larger map continue through a product; those of the smaller one, its gates, do not."""
    (other,) = [n for n in part.sources(node) if n is not source] or [source]
    mine, theirs = part.shapes[source], part.shapes[other]
    return None if math.prod(mine[2:]) < math.prod(theirs[2:]) else SAME


def padding_of(part: TracedPart, node: fx.Node) -> tuple[int, int, int] | None:
    """How many channels, rows and columns a padding adds at the start; None if unknown."""
    sides = part.leaf(node).padding if node.op == "call_module" else argument(node, 1, "pad")
    if not isinstance(sides, list | tuple) or not all(isinstance(n, int) and n >= 0 for n in sides):
        return None
    left = [*sides[::2], 0, 0, 0]
    return left[2], left[1], left[0]


# --- which arguments a row is for -------------------------------------------------------------------------------------


def _groups_are(grouping: Callable[[nn.Conv2d | nn.Conv3d], bool], part: TracedPart, node: fx.Node) -> bool:
    layer = part.leaf(node)
    return isinstance(layer, nn.Linear) or grouping(layer)  # type: ignore[arg-type]


def _is_depthwise(layer: nn.Conv2d | nn.Conv3d) -> bool:
    return layer.groups > 1 and layer.groups == layer.in_channels == layer.out_channels


def _over_space(part: TracedPart, node: fx.Node) -> bool:
    axes = argument(node, 1, "dim")
    axes = [axes] if isinstance(axes, int) else axes
    return isinstance(axes, list | tuple) and sorted(d % part.rank for d in axes if isinstance(d, int)) == list(
        range(2, part.rank)
    )


def _to_rows(part: TracedPart, node: fx.Node) -> bool:
    """A map's channels and positions become one axis, channel after channel."""
    before, after = (part.shapes.get(n, ()) for n in (part.sources(node)[0], node))
    return (
        len(before) in (2, part.rank)
        and len(after) == 2
        and before[0] == after[0]
        and math.prod(before[1:]) == after[1]
    )


def _along_channels(part: TracedPart, node: fx.Node) -> bool:
    axis = argument(node, 1, "dim", 0)
    return isinstance(axis, int) and axis % max(1, len(part.shapes.get(node, (0, 0, 0, 0)))) == 1


def _alike(part: TracedPart, node: fx.Node) -> bool:
    """Two maps with the same number of channels: channel k is combined with channel k."""
    sizes = [part.shapes.get(n, ()) for n in node.args if isinstance(n, fx.Node)]
    plain = not node.kwargs  # add's alpha would scale
    return plain and len(sizes) == 2 and all(len(size) == part.rank for size in sizes) and sizes[0][1] == sizes[1][1]


def _is_padding(part: TracedPart, node: fx.Node) -> bool:
    constant = node.op == "call_module" or argument(node, 2, "mode", "constant") == "constant"
    zero = node.op == "call_module" or not argument(node, 3, "value", 0)
    return part.rank == 4 and constant and zero and padding_of(part, node) is not None


def _keeps_corner(part: TracedPart, node: fx.Node) -> bool:
    """A slice that keeps every channel and position (0, 0): ``x[:, :, ::2, ::2]``."""
    index: Any = node.args[1]
    if part.rank != 4 or not isinstance(index, tuple) or not all(isinstance(i, slice) for i in index):
        return False
    steps = [1 if i.step is None else i.step for i in index]
    whole = all(i == slice(None) for i in index[:2])
    return whole and all(i.start in (None, 0) for i in index) and all(isinstance(s, int) and s > 0 for s in steps)


def _to_floats(part: TracedPart, node: fx.Node) -> bool:
    """A conversion to another device, or to another type of real numbers."""
    given = (*node.args[1:], *node.kwargs.values())
    types = [g for g in given if isinstance(g, torch.dtype)]
    return not any(isinstance(g, fx.Node) for g in given) and all(t.is_floating_point for t in types)


def _of_channels(part: TracedPart, node: fx.Node) -> bool:
    """Some of the channels, or all in another order: ``x[:, [2, 1, 0]]``."""
    if any(len(part.shapes.get(n, ())) != part.rank for n in (node, part.sources(node)[0])):
        return False
    if part.operation(node) == "index_select":
        return argument(node, 1, "dim") in (1, 1 - part.rank)
    index: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if Ellipsis in [i for i in index if not isinstance(i, fx.Node)]:
        place = next(k for k, i in enumerate(index) if i is Ellipsis)
        index = (*index[:place], *[slice(None)] * (part.rank + 1 - len(index)), *index[place + 1 :])
    return all(isinstance(i, slice) and i == slice(None) for k, i in enumerate(index) if k != 1)


def _is_map(part: TracedPart, node: fx.Node) -> bool:
    return all(len(part.shapes.get(n, ())) == 4 for n in (node, part.sources(node)[0]))


def _not_over_space(part: TracedPart, node: fx.Node) -> bool:
    axes = node.args[1:] if not isinstance(argument(node, 1, "dims"), list | tuple) else argument(node, 1, "dims")
    return bool(axes) and all(isinstance(d, int) and d % part.rank in (0, 1) for d in axes)


def _is_known_move(part: TracedPart, node: fx.Node) -> bool:
    """A permutation that moves channels from the second axis to the last, or back."""
    mapped = len(part.shapes.get(node, ())) == 4 and (node.op != "call_module" or hasattr(part.leaf(node), "dims"))
    return mapped and axes_of(part, node) in (TO_LAST, TO_SECOND)


# --- which positions see which ----------------------------------------------------------------------------------------


def _point(part: TracedPart, node: fx.Node) -> Window:
    return POINT


def _kernel(part: TracedPart, node: fx.Node) -> Window | None:
    layer = part.leaf(node)
    if isinstance(layer, nn.Linear) and channels_are_last(part, node):
        return POINT
    if not isinstance(layer, nn.Conv2d | nn.Conv3d):
        return None
    kernel, stride, dilation = (tuple(v) for v in (layer.kernel_size, layer.stride, layer.dilation))
    return Window(kernel, stride, leading_padding(layer, part.shapes.get(part.sources(node)[0], ())), dilation)


def leading_padding(layer: nn.Conv2d | nn.Conv3d, given: tuple[int, ...]) -> Sides:
    """How much padding a convolution adds at the start of each axis: rows and columns, preceded by frames for video."""
    if type(layer) in (nn.Conv2d, nn.Conv3d) and not isinstance(layer.padding, str):
        return tuple(layer.padding)
    # A subclass may pad in its own way, so its padding is observed.
    return tuple(_observed_padding(layer, given, axis) for axis in range(2, layer.weight.dim()))


def _observed_padding(layer: nn.Conv2d | nn.Conv3d, shape: tuple[int, ...], axis: int) -> int:
    """The padding along one axis, found by running the layer: a row of NaN shows whether output 0 sees that row."""
    reach = (layer.kernel_size[axis - 2] - 1) * layer.dilation[axis - 2]
    for row in range(min(reach, shape[axis] - 1), -1, -1):
        probe = torch.zeros(1, *shape[1:], device=layer.weight.device, dtype=layer.weight.dtype)
        probe.select(axis, row).fill_(float("nan"))
        with torch.no_grad():
            if layer(probe).select(axis, 0).isnan().any():
                return reach - row
    return reach


def _norm_window(part: TracedPart, node: fx.Node) -> Window | None:
    """A norm over the channels at each position sees only that position; a norm over positions sees all of them. Which
    one a class is, is found by running it with NaN at one position."""
    source = part.sources(node)[0]
    shape = part.shapes.get(source, ())
    if len(shape) != 4 or node.op != "call_module":
        return None
    layer = part.leaf(node)
    like = next(layer.parameters(), torch.zeros(()))
    probe = torch.zeros(1, *shape[1:], device=like.device, dtype=like.dtype)
    maps = probe.movedim(-1, 1) if channels_are_last(part, source) else probe
    maps[..., 0, 0] = float("nan")
    try:
        with torch.no_grad():
            given = layer(probe)
    except Exception:  # the layer's own code
        return None
    found = (given.movedim(-1, 1) if channels_are_last(part, source) else given).isnan().any(1)
    return POINT if found.shape == maps[:, 0].shape and int(found.sum()) == 1 else None


def _pool(part: TracedPart, node: fx.Node) -> Window:
    """A pooling window, from the module's attributes or the function's arguments."""
    names = ("kernel_size", "stride", "padding", "dilation")
    if node.op == "call_module":
        given = {name: getattr(part.leaf(node), name) for name in names if hasattr(part.leaf(node), name)}
    else:
        given = dict(zip(names, node.args[1:], strict=False)) | node.kwargs
        if "max" not in part.operation(node):
            given.pop("dilation", None)  # average pooling has another argument in this place
    kernel = given["kernel_size"]
    values = (kernel, given.get("stride") or kernel, given.get("padding", 0), given.get("dilation", 1))
    sides = _triple if part.rank == 5 else _pair
    return Window(*(tuple(int(n) for n in sides(value)) for value in values))


def _unshuffle_window(part: TracedPart, node: fx.Node) -> Window:
    source = part.shapes[part.sources(node)[0]]
    sides = tuple(before // after for before, after in zip(source[2:], part.shapes[node][2:], strict=True))
    return Window(kernel=sides, stride=sides)


def _pad_window(part: TracedPart, node: fx.Node) -> Window | None:
    before = padding_of(part, node)
    return None if before is None else Window(padding=(before[1], before[2]))


def _stride(part: TracedPart, node: fx.Node) -> Window:
    index: Any = node.args[1]
    steps = [1 if i.step is None else i.step for i in (*index, *[slice(None)] * 4)][2:4]
    return Window(stride=(steps[0], steps[1]))


def pooled_share(part: TracedPart, node: fx.Node) -> float:
    """The factor by which average pooling scales a value at one position; 1 for all other operations."""
    op = op_of(part, node)
    if op.kind is not Kind.SPATIAL or "max" in part.operation(node).lower():
        return 1.0
    window = op.window()
    if window is not None:
        return 1 / math.prod(window.kernel)
    areas = [math.prod(part.shapes[n][2:]) for n in (node, part.sources(node)[0])]
    return min(1.0, areas[0] / areas[1])


def repeats_positions(part: TracedPart, node: fx.Node) -> bool:
    """Whether adaptive pooling turns a map into a larger one, in which positions appear several times."""
    op = op_of(part, node)
    if op.kind is not Kind.SPATIAL or op.window() is not None:
        return False
    return math.prod(part.shapes[node][2:]) > math.prod(part.shapes[part.sources(node)[0]][2:])


# --- mean and deviation of channels -----------------------------------------------------------------------------------

_POINTS, _WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(64))


def through_activation(activation: Activation, mean: Tensor, deviation: Tensor) -> Moments:
    """Mean and deviation of the activation of a Gaussian, by quadrature."""
    values = activation.function(mean[:, None] + deviation[:, None] * _POINTS)
    weights = _WEIGHTS / _WEIGHTS.sum()
    first = values @ weights
    second = (values - first[:, None]).square() @ weights
    return first, second.clamp(min=0).sqrt()


def _of_norm(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments:
    affine, activation = affine_of(part.leaf(node)), op_of(part, node).activation
    known = affine.mean, affine.deviation
    return through_activation(activation, *known) if activation else known


def _of_activation(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments:
    activation = op_of(part, node).activation
    assert activation is not None
    return through_activation(activation, *sources[0])


def _first(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments:
    return sources[0]


def _of_sum(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments | None:
    if len(sources) != 2:
        return None
    (mean, deviation), (other_mean, other_deviation) = sources
    return mean + other_mean, (deviation.square() + other_deviation.square()).sqrt()


def _of_join(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments:
    return torch.cat([mean for mean, _ in sources]), torch.cat([deviation for _, deviation in sources])


def _of_pad(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments | None:
    before = padding_of(part, node)
    if before is None:
        return None
    padded = [torch.zeros(part.shapes[node][1], dtype=torch.float64) for _ in sources[0]]
    for wide, values in zip(padded, sources[0], strict=True):
        wide[before[0] : before[0] + len(values)] = values
    return padded[0], padded[1]


def _of_unshuffle(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments:
    each = part.shapes[node][1] // part.shapes[part.sources(node)[0]][1]
    return sources[0][0].repeat_interleave(each), sources[0][1].repeat_interleave(each)


def _of_shuffle(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments:
    """Mean and deviation of the mixture of several channels."""
    mean, deviation = (moment.view(part.shapes[node][1], -1) for moment in sources[0])
    second = (mean.square() + deviation.square()).mean(1)
    return mean.mean(1), (second - mean.mean(1).square()).clamp(min=0).sqrt()


def _of_flatten(part: TracedPart, node: fx.Node, sources: list[Moments]) -> Moments:
    area = math.prod(part.shapes[part.sources(node)[0]][2:])
    return sources[0][0].repeat_interleave(area), sources[0][1].repeat_interleave(area)


# --- the table --------------------------------------------------------------------------------------------------------

NORM = Rule(Kind.NORM, span=_same, window=_point, moments=_of_norm)
ACTIVATION = Rule(Kind.ACTIVATION, span=_same, window=_point, anywhere=True, moments=_of_activation)
_ungrouped = partial(_groups_are, lambda layer: layer.groups == 1)
_depthwise = partial(_groups_are, _is_depthwise)
_transposed_or_conv = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)


def _names(*names: str) -> frozenset[str]:
    return frozenset(names)


TABLE: Sequence[Rule] = (
    Rule(Kind.DENSE, (nn.Linear, *_transposed_or_conv), fits=_ungrouped, window=_kernel, anywhere=True),
    Rule(Kind.DEPTHWISE, (nn.Conv2d, nn.Conv3d), fits=_depthwise, span=_same, window=_kernel),
    Rule(Kind.GROUPED, _transposed_or_conv, window=_kernel),
    Rule(
        Kind.NOTHING, (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d),
        _names("dropout", "dropout2d", "stochastic_depth", "StochasticDepth", "drop_path", "DropPath", "contiguous",
               "clone", "float", "double", "_assert"),
        span=_same, window=_point, anywhere=True, keeps_sign=True, moments=_first,
    ),
    Rule(
        Kind.NOTHING, names=_names("to"), fits=_to_floats,
        span=_same, window=_point, anywhere=True, keeps_sign=True, moments=_first,
    ),
    Rule(
        Kind.SPATIAL, (nn.MaxPool2d, nn.AvgPool2d, nn.MaxPool3d, nn.AvgPool3d),
        _names("max_pool2d", "avg_pool2d", "max_pool3d", "avg_pool3d"),
        span=_same, window=_pool, keeps_sign=True, moments=_first,
    ),
    Rule(
        Kind.SPATIAL, (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
        _names("adaptive_avg_pool2d", "adaptive_max_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool3d"),
        span=_same, keeps_sign=True, moments=_first,
    ),
    Rule(Kind.SPATIAL, names=_names("mean"), fits=_over_space, span=_same, keeps_sign=True, moments=_first),
    Rule(
        Kind.PAD, (nn.ZeroPad2d,), _names("pad"), fits=_is_padding,
        span=_padded, window=_pad_window, keeps_sign=True, moments=_of_pad,
    ),
    Rule(
        Kind.FLATTEN, (nn.Flatten,), _names("flatten"), fits=_to_rows,
        span=_flattened, keeps_sign=True, moments=_of_flatten,
    ),
    # Sub-pixel convolutions: channels k·r² … k·r² + r² − 1 become channel k of a map r times as high and wide.
    Rule(
        Kind.SHUFFLE, (nn.PixelShuffle,), _names("pixel_shuffle"), fits=_is_map, keeps_sign=True, moments=_of_shuffle,
    ),
    Rule(
        Kind.UNSHUFFLE, (nn.PixelUnshuffle,), _names("pixel_unshuffle"), fits=_is_map,
        span=_unshuffled, window=_unshuffle_window, keeps_sign=True, moments=_of_unshuffle,
    ),
    Rule(
        Kind.JOIN, names=_names("cat"), fits=_along_channels,
        span=_joined, window=_point, keeps_sign=True, moments=_of_join,
    ),
    Rule(
        Kind.SUM, names=_names("add"), fits=_alike,
        span=_same, window=_point, anywhere=True, keeps_sign=True, moments=_of_sum,
    ),
    Rule(Kind.PRODUCT, names=_names("mul"), fits=_alike, span=_gated, window=_point, anywhere=True),
    Rule(
        Kind.SLICE, names=_names("getitem"), fits=_keeps_corner,
        span=_same, window=_stride, keeps_sign=True, moments=_first,
    ),
    # Rounding to 8 bits keeps channels in place and moves each value by at most half a step.
    Rule(
        Kind.NOTHING, names=_names("fake_quantize_per_tensor_affine"),
        span=_same, window=_point, anywhere=True, keeps_sign=True, moments=_first,
    ),
    # Group norm and layer norm divide each channel by a deviation over several, so channels are not followed through.
    Rule(Kind.MIXING, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm), window=_norm_window, anywhere=True),
    Rule(Kind.PERMUTE, names=_names("permute", "Permute"), fits=_is_known_move, window=_point, anywhere=True),
    # These act on each position by itself, but channels are not followed through them.
    Rule(Kind.UNKNOWN, names=_names("add", "sub", "mul", "truediv", "neg"), window=_point, anywhere=True),
    Rule(Kind.UNKNOWN, names=_names("cat"), window=_point),
    Rule(Kind.UNKNOWN, names=_names("flip"), fits=_not_over_space, window=_point),
    Rule(Kind.UNKNOWN, names=_names("getitem", "index_select"), fits=_of_channels, window=_point),
)  # fmt: skip


def is_reshape(part: TracedPart, node: fx.Node) -> bool:
    """Whether a node returns the same values in the same order, in another shape."""
    return canonical(part.operation(node)) in ("flatten", "unsqueeze", "Identity") and node.op != "get_attr"


def is_sum(part: TracedPart, node: fx.Node) -> bool:
    """Whether a node is an addition, whatever the shapes."""
    return node.op != "get_attr" and canonical(part.operation(node)) == "add"


def is_product(part: TracedPart, node: fx.Node) -> bool:
    return node.op != "get_attr" and canonical(part.operation(node)) == "mul"


def never_negative(part: TracedPart, node: fx.Node) -> bool:
    """True if the table shows that a node's output has no negative values."""
    op = op_of(part, node)
    if op.activation is not None:
        return op.activation.never_negative
    sources = part.sources(node)
    return op.rule.keeps_sign and bool(sources) and all(never_negative(part, source) for source in sources)
