"""Network: a model, traced once, with its sites. Stains, locks, certificates and attacks all use it.

Sites are the layers that a detector can be written into. φ(x) is a site's input, and `respond` gives the responses
v·φ(x) of many detectors to it at once.

In a squeeze-and-excite block a map is pooled, and two dense layers compute one gate per channel:

    gate(x) = σ(S₂ h(S₁ pool(x) + τ₁) + τ₂),        x ↦ x · gate(x)

Some have a third layer over the same hidden units, whose output is added to the channels. If σ is tanh, a gate can also
flip a channel's sign.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from stainlock.errors import ModelError, SiteError, meant
from stainlock.network.graph import (
    Field,
    Followers,
    Near,
    Reader,
    Reason,
    Shapes,
    Stop,
    TracedPart,
    follow,
    near_fields,
    receptive_fields,
    trace,
    tracing_problem,
)
from stainlock.network.norms import is_batch_norm, scales
from stainlock.network.ops import (
    KEEPING,
    Activation,
    Kind,
    activation_of_function,
    activation_of_module,
    is_product,
    is_reshape,
    is_sum,
    leading_padding,
    op_of,
    repeats_positions,
)
from stainlock.numerics import has, raw
from stainlock.target import Target, check_editable, check_target, evaluation_mode, logits_in, running_on

_shared: ContextVar[dict[Any, Network] | None] = ContextVar("analyses", default=None)


def analyse(target: Target) -> Network:
    """Trace the model and describe every Linear, Conv2d and ConvTranspose2d it calls.

    >>> list(sl.analyse(target).sites)
    ['0', '3', '7']
    """
    check_target(target)
    known = _shared.get()
    conventions = (id(target.model), target.part, target.input_shape, target.mean, target.std, target.bounds)
    if known is None:
        return _analysed(target)
    if conventions not in known:
        known[conventions] = _analysed(target)
    return known[conventions]


@contextmanager
def sharing_analysis() -> Iterator[None]:
    """Inside, each model is analysed only once, however often `analyse` is called. Models must not be changed."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def _analysed(target: Target) -> Network:
    check_editable(target)
    grey = torch.full((1, *target.input_shape), sum(target.bounds) / 2)
    example = target.normalise(grey)
    with evaluation_mode(target.model), torch.no_grad(), running_on(target):
        if target.output:
            target.predict(grey)  # refuses a name that the output does not have
        parts = trace(target.traced, target.part, (example, *(() if target.part else target.extra_inputs)))
        whole = len(parts) == 1 and parts[0].name == target.part
        sites = find_sites(target, parts, example, whole=whole)
    if not sites:
        raise ModelError(
            f"{type(target.model).__name__} has no Linear, Conv2d or ConvTranspose2d that can be reached by tracing"
        )
    return Network(target, parts, sites)


class Network:
    """A target, its traced parts, and its sites by name.

    `part`, `shapes`, `nodes`, `blocks` and everything that follows a signal through the network need a model that
    traces as a whole. Sites do not.
    """

    def __init__(self, target: Target, parts: list[TracedPart], sites: dict[str, Site]) -> None:
        self.target, self.parts, self.sites = target, parts, sites
        self._taps: dict[fx.Node, tuple[int, int] | None] = {}
        self.measured: dict[str, tuple[Tensor, Tensor]] = {}  # cache of `stainlock.stains.choice`
        self.steps: dict[tuple[fx.Node, fx.Node], Any] = {}  # cache of `stainlock.locks.parts.route`

    def site(self, name: str) -> Site:
        if name in self.sites:
            return self.sites[name]
        modules = dict(self.target.model.named_modules())
        if name in modules:
            raise SiteError(
                f"{name} is a {type(modules[name]).__name__}: expected a Linear, Conv2d or ConvTranspose2d"
                " that the model calls; `stainlock inspect` lists them"
            )
        raise SiteError(f"no site {name!r}; {meant(name, self.sites) or 'see stainlock inspect'}")

    @property
    def is_whole(self) -> bool:
        """Whether the network traced as one graph."""
        return len(self.parts) == 1 and self.parts[0].name == self.target.part

    @cached_property
    def part(self) -> TracedPart:
        """The whole network as one graph; `ModelError` if it does not trace as a whole."""
        if not self.is_whole:
            problem = tracing_problem(self.target.traced)
            raise ModelError(
                f"a lock follows its signal through {self.target.part or 'the network'}, so that must trace with"
                f" torch.fx as a whole, but tracing fails {problem}; name a part that traces with Target(part=...)"
            )
        return self.parts[0]

    @property
    def shapes(self) -> Shapes:
        return self.part.shapes

    @cached_property
    def calls(self) -> Counter[str]:
        """How often each module is called, by its name in the traced part."""
        return Counter(str(n.target) for n in self.part.graph.nodes if n.op == "call_module")

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {self.part.path(n): n for n in self.part.graph.nodes if n.op == "call_module"}

    @cached_property
    def blocks(self) -> dict[fx.Node, Block]:
        """Squeeze-and-excite blocks, by the node that multiplies by the gates."""
        return find_blocks(self.part)

    @cached_property
    def repeats_positions(self) -> bool:
        """Whether adaptive pooling somewhere enlarges a map, so that position (0, 0) appears several times."""
        return any(repeats_positions(self.part, n) for n in self.part.graph.nodes)

    def leaf(self, node: fx.Node) -> nn.Module | None:
        return self.part.leaf(node) if node.op == "call_module" else None

    def name(self, node: fx.Node) -> str:
        return self.part.path(node)

    def path(self, module: str) -> str:
        """The full name in the model of a module of the traced part."""
        return ".".join(filter(None, (self.part.name, module)))

    def kind(self, node: fx.Node) -> Kind:
        return op_of(self.part, node).kind

    def activation(self, node: fx.Node) -> Activation | None:
        return op_of(self.part, node).activation

    def around(self, node: fx.Node) -> list[str]:
        """The names in the traced part of the modules whose code calls an operation, outermost first."""
        return [name for name, _ in node.meta.get("nn_module_stack", {}).values()]

    def calls_of(self, module: str) -> int:
        """How often a module that contains other modules is called."""
        stacks = [node.meta.get("nn_module_stack", {}) for node in self.part.graph.nodes]
        return len({call for stack in stacks for call, (name, _) in stack.items() if name == module})

    @property
    def logits(self) -> fx.Node:
        """The Linear layer whose output is the model's output."""
        if self._last is None:
            raise ModelError(
                "an internal lock needs a classifier that ends in a Linear layer with a bias, which becomes its"
                " disruptor: use kind squeeze-excite"
            )
        return self._last

    @property
    def has_logits(self) -> bool:
        return self._last is not None

    def ends_at(self, node: fx.Node) -> bool:
        return node is self._last

    @cached_property
    def _last(self) -> fx.Node | None:
        (output,) = [n for n in self.part.graph.nodes if n.op == "output"]
        node: Any = self._logits_in(output.args[0])
        while isinstance(node, fx.Node) and self.kind(node) is Kind.NOTHING:
            node = node.args[0]
        leaf = self.leaf(node) if isinstance(node, fx.Node) else None
        ends = isinstance(leaf, nn.Linear) and has(leaf, "bias") and len(self.shapes[node]) == 2
        return node if ends and not self.target.part else None

    def _logits_in(self, output: Any) -> Any:
        """The node of the logits in what the graph returns: as for the model's own output, by name or the only one."""
        made: Any = output.target if isinstance(output, fx.Node) else None
        if dataclasses.is_dataclass(made):
            output = output.kwargs
        elif hasattr(made, "_fields"):  # a named tuple
            output = dict(zip(made._fields, output.args, strict=False))
        if self.target.output and not isinstance(output, fx.Node):
            output = self.target.named_output(output)
        return logits_in(output, fx.Node)

    def tap(self, node: fx.Node) -> tuple[int, int] | None:
        """The kernel element through which output position (0, 0) sees input position (0, 0); None if there is none."""
        if node not in self._taps:
            layer: Any = self.leaf(node)
            before = leading_padding(layer, self.shapes[node.all_input_nodes[0]])
            taps = [
                p // d if p % d == 0 and p // d < k else -1
                for p, d, k in zip(before, layer.dilation, layer.kernel_size, strict=True)
            ]
            self._taps[node] = None if min(taps) < 0 else (taps[0], taps[1])
        return self._taps[node]

    def norm_behind(self, node: fx.Node) -> fx.Node | None:
        """The batch norm after a layer; None if the layer's output has another user or no batch norm."""
        (only,) = node.users if len(node.users) == 1 else (None,)
        return only if only is not None and is_batch_norm(self.leaf(only)) else None

    def cuts(self, node: fx.Node) -> bool:
        """Whether every path from the input to the outputs passes this node."""
        reached = {n for n in self.part.graph.nodes if n.op == "placeholder"}
        for n in self.part.graph.nodes:
            if n is not node and n not in self.part.sizes and any(a in reached for a in n.all_input_nodes):
                reached.add(n)
        (output,) = [n for n in self.part.graph.nodes if n.op == "output"]
        return output not in reached

    def area(self, node: fx.Node) -> int:
        return math.prod(self.shapes[node][2:])


# --- sites ------------------------------------------------------------------------------------------------------------

SiteKind = Literal["linear", "convolution", "transposed"]
_LAYERS: dict[type[nn.Module], SiteKind] = {
    nn.Linear: "linear",
    nn.Conv2d: "convolution",
    nn.Conv3d: "convolution",
    nn.ConvTranspose2d: "transposed",
}
# In fewer dimensions natural features come close to any direction, so a random one is not secret.
MINIMUM_DIMENSION = 16


@dataclass(frozen=True)
class Site:
    """A layer that a detector can be written into, with the affine map and activation after it.

    The pre-activation of channel k is ``g·(w_k·φ(x) + c_k) + h``, where φ(x) is the layer's input at one position.

    - ``norm``: the name of the batch norm that holds g and h, if there is one.
    - ``grid``: the shape of the layer's positions: rows and columns, preceded by frames for video; or tokens.
    - ``field``, ``patch``: the pixels that one position sees, and the size of that part of the input. A ``field`` of
      None means the whole input.
    - ``readers``, ``stops``: the layers that read the channels, and where channels can't be followed further.
    - ``problem``: why a silent detector can't go here; None if it can.
    - ``additive_problem``: why not even an additive stain can go here; None if it can.
    - ``write_problem``: why the layer can't be written at all; None if only its dimension may be too small for a stain.
    - ``near``: what a position sees while the gates of squeeze-and-excite blocks before it are held constant, if that
      is less than ``patch``.

    >>> site = sl.analyse(target).site("3")
    >>> site.kind, site.dimension, site.channels, site.problem
    ('convolution', 288, 64, None)
    """

    name: str
    kind: SiteKind
    dimension: int
    channels: int
    groups: int
    grid: tuple[int, ...]
    norm: str | None
    activation: Activation | None
    readers: tuple[Reader, ...]
    stops: tuple[Stop, ...]
    field: Field | None
    patch: tuple[int, ...]
    problem: str | None
    additive_problem: str | None
    write_problem: str | None
    near: Near | None = None

    @property
    def searched(self) -> tuple[int, ...]:
        """The size of the part of the input in which a trigger is searched: that of ``near`` if given, else ``patch``.

        >>> site = sl.analyse(target).site("3")
        >>> site.searched == site.patch
        True
        """
        if self.near is None:
            return self.patch
        return tuple(min(axis.size, n) for axis, n in zip(self.near.field, self.patch, strict=True))

    def layer(self, model: nn.Module) -> nn.Module:
        """The site's layer in a model.

        >>> sl.analyse(target).site("3").layer(model) is model[3]
        True
        """
        return model.get_submodule(self.name)

    def rows(self, model: nn.Module) -> Tensor:
        """The layer's weights as row vectors of the detector's dimension: one per channel, or several if transposed.

        >>> sl.analyse(target).site("3").rows(model).shape
        torch.Size([64, 288])
        """
        return weight_rows(raw(self.layer(model), "weight"), self.kind)

    def group_of(self, channel: int) -> int:
        """The group of a grouped layer that a channel belongs to.

        >>> sl.analyse(target).site("3").group_of(channel=5)
        0
        """
        return channel // (self.channels // self.groups)


def weight_rows(weight: Tensor, kind: SiteKind) -> Tensor:
    """The rows that multiply the layer's input. A transposed kernel has one per tap (the paper's c×1×1 form)."""
    if kind == "transposed":
        return weight.permute(1, 2, 3, 0).flatten(0, 2)
    return weight.flatten(1)


def find_sites(target: Target, parts: list[TracedPart], example: Tensor, *, whole: bool) -> dict[str, Site]:
    """Every Linear, Conv2d, Conv3d and ConvTranspose2d that the model calls, by name.

    If the model did not trace as a ``whole``, the inputs of its parts are unknown, so the inputs of their layers are
    observed by running the model.
    """
    constant: set[str] = set()
    if whole:
        called, calls = _called_layers(parts[0])
    else:
        called, calls, constant = _observed_layers(target, example)
    sites: dict[str, Site] = {}
    holders = _holders_of_weights(target.model)
    for part in parts:
        fields = receptive_fields(part) if part.shapes else {}
        pooled, near = near_fields(part) if whole and part.runs and not target.extra_inputs else (frozenset(), {})
        for node in part.graph.nodes:
            if node.op != "call_module":
                continue
            name, layer = part.path(node), part.leaf(node)
            if _kind(layer) and name in called and name not in sites:
                followers = follow(part, node)
                if followers.norm is not None and calls[followers.norm] > 1:
                    followers.activation = None
                    followers.stops.insert(0, Stop(followers.norm, "BatchNorm", Reason.SHARED))
                trouble = None
                if calls[name] > 1:
                    trouble = "the model calls this layer more than once"
                elif name in constant or (fields and node not in fields):
                    trouble = "its input does not depend on the image"
                elif called[name] is None:
                    trouble = "its input has several rows per image, folded into the batch"
                elif others := [n for n in holders[id(layer._parameters.get("weight"))] if n != name]:
                    trouble = f"its weight is shared with {others[0]}"
                site = _site(target, name, layer, followers, called[name] or (), fields.get(node), trouble)
                if site.field is None and (around := near.get(node)) is not None:
                    nearby = replace(site, near=Near(part, node, pooled, around))
                    site = nearby if nearby.searched != site.patch else site
                sites[name] = site
            elif isinstance(layer, nn.TransformerEncoder | nn.TransformerEncoderLayer):
                for inner_name, inner, followers in _transformer_layers(name, layer):
                    grid = called.get(inner_name) or part.shapes.get(node, ())[1:-1]
                    trouble = None if _batch_first(layer) else "its tokens precede the batch axis (batch_first=False)"
                    sites[inner_name] = _site(target, inner_name, inner, followers, grid, None, trouble)
    return sites


def _holders_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """The layers that hold each weight; a tied weight has several."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if "weight" in module._parameters and module._parameters["weight"] is not None:  # scripted ones have no get()
            holders[id(module._parameters["weight"])].append(name)
    return holders


def _kind(layer: nn.Module) -> SiteKind | None:
    return next((kind for cls, kind in _LAYERS.items() if isinstance(layer, cls)), None)


Grids = dict[str, tuple[int, ...] | None]  # positions of each layer; None if its first axis is not the batch


def _called_layers(part: TracedPart) -> tuple[Grids, Counter[str]]:
    """The positions of every layer in the graph, and how often each module is called."""
    shapes = part.shapes
    grids: Grids = {}
    calls: Counter[str] = Counter()
    for node in part.graph.nodes:
        if node.op == "call_module":
            calls[part.path(node)] += 1
            if (kind := _kind(part.leaf(node))) and node in shapes:
                grids[part.path(node)] = _grid(kind, shapes[node], shapes.get(node.all_input_nodes[0], ()))
    return grids, calls


def _grid(kind: SiteKind, output: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...] | None:
    if output[0] != 1:
        return None
    if kind == "linear":
        return output[1:-1]
    return given[2:] if kind == "transposed" else output[2:]


def _observed_layers(target: Target, example: Tensor) -> tuple[Grids, Counter[str], set[str]]:
    """The same for the layers that one run of the model calls, and those whose input does not depend on the image."""
    grids: Grids = {}
    calls: Counter[str] = Counter()
    given_values: dict[str, list[Tensor]] = defaultdict(list)

    def record(name: str, kind: SiteKind | None) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            calls[name] += 1
            if kind is not None:
                grids[name] = _grid(kind, tuple(output.shape), tuple(given[0].shape))
                given_values[name].append(given[0].double().sum())

        return hook

    noise = torch.rand(example.shape, generator=torch.Generator().manual_seed(0)).to(example)
    with ExitStack() as hooks:
        for name, layer in target.model.named_modules():
            hooks.enter_context(layer.register_forward_hook(record(name, _kind(layer))))
        for image in (example, example + noise):
            calls.clear()
            target.traced(image) if target.part else target(image)
    constant = {name for name, values in given_values.items() if len(values) == 2 and values[0] == values[1]}
    return grids, calls, constant


def _batch_first(module: nn.Module) -> bool:
    attentions = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
    return all(m.batch_first for m in attentions)


def _transformer_layers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Linear, Followers]]:
    """PyTorch's own encoder layers don't trace, but their feed-forward block is known: linear1, activation, linear2."""
    for inner_name, inner in module.named_modules(prefix=name):
        if isinstance(inner, nn.TransformerEncoderLayer):
            activation = (
                activation_of_module(inner.activation)
                if isinstance(inner.activation, nn.Module)
                else activation_of_function(inner.activation, (), {})
            )
            reader = Reader(f"{inner_name}.linear2", 0, 1)
            yield f"{inner_name}.linear1", inner.linear1, Followers(activation=activation, readers=[reader])


def uses_weight_as_it_is(layer: nn.Module) -> bool:
    """Whether twice the weight gives twice the output. It does not if a layer standardises its weight first, which does
    not show if it then multiplies by a gain that is still zero."""
    if type(layer) in _LAYERS:
        return True
    weight = raw(layer, "weight")
    if isinstance(layer, nn.Linear):
        shape: tuple[int, ...] = (1, layer.in_features)
    else:
        assert isinstance(layer, nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d)
        sides = zip(layer.kernel_size, layer.dilation, strict=True)
        shape = (1, layer.in_channels, *((kernel - 1) * dilation + 1 for kernel, dilation in sides))
    features = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(weight)
    bias = {"bias": torch.zeros_like(raw(layer, "bias"))} if has(layer, "bias") else {}
    try:
        with torch.no_grad():
            once, twice = (functional_call(layer, {"weight": n * weight, **bias}, (features,)) for n in (1, 2))
    except Exception:  # the layer's own code, which may need more arguments
        return False
    hidden = bool(weight.any()) and not bool(once.any())
    return not hidden and torch.allclose(2 * once, twice, rtol=1e-2, atol=1e-2 * float(once.abs().max()))


def _site(
    target: Target,
    name: str,
    layer: nn.Module,
    followers: Followers,
    grid: tuple[int, ...],
    seen: Field | None,
    trouble: str | None,
) -> Site:
    kind = _kind(layer)
    assert kind is not None
    rows = weight_rows(raw(layer, "weight"), kind)
    groups = int(getattr(layer, "groups", 1))
    channels = int(getattr(layer, "out_channels", 0) or getattr(layer, "out_features", 0))
    spatial = target.input_shape[1:]
    patch = spatial
    if seen is not None:
        patch = tuple(min(axis.size, n) for axis, n in zip(seen, spatial, strict=True))
    dimension = rows.shape[1]
    write_problem = None
    if is_parametrized(layer, "weight") or "weight" not in layer._parameters:
        write_problem = "its weight is computed by a parametrisation: remove that first"
    elif not uses_weight_as_it_is(layer):
        write_problem = f"it is a {type(layer).__name__}, which changes its weight before using it: use another"
    elif trouble is not None:
        write_problem = trouble
    elif kind == "transposed" and groups > 1:
        write_problem = "grouped transposed convolutions are not supported"
    additive_problem = write_problem
    if additive_problem is None and dimension < MINIMUM_DIMENSION:
        additive_problem = f"dimension {dimension} is below {MINIMUM_DIMENSION}: natural inputs reach any direction"
    elif _is_mostly_zero(target.model, rows, followers.norm):
        additive_problem = "most of its channels are zero, and so would be a detector of their size: use another"
    problem = additive_problem
    last = next((stop for stop in followers.stops if stop.reason in (Reason.RETURNED, Reason.GATES)), None)
    if problem is None and followers.activation is not None and last is not None:
        problem = f"a silent channel would change {last}"
    elif problem is None and followers.activation is None:
        obstacles = [f"addition {name}" for name in followers.merges] + [str(stop) for stop in followers.stops]
        where = next(iter(obstacles), "the next layer")
        problem = f"no activation silences a detector before {where}"
    elif problem is None and not has(layer, "bias") and followers.norm is None:
        problem = "the layer has neither bias nor batch norm to hold a threshold"
    return Site(
        name, kind, dimension, channels, groups, grid, followers.norm, followers.activation, tuple(followers.readers),
        tuple(followers.stops), seen, patch, problem, additive_problem, write_problem,
    )  # fmt: skip


def _is_mostly_zero(model: nn.Module, rows: Tensor, norm: str | None) -> bool:
    """Whether at least half of the channels have zero weights or a zero scale, as the last layers of residual branches
    do before training, or pruned ones afterwards."""
    if not float(rows.detach().abs().amax(1).median()):
        return True
    return norm is not None and not float(scales(model.get_submodule(norm)).median())


# --- what a site is given ---------------------------------------------------------------------------------------------


class Reached(Exception):
    """Stops a forward pass at the layer whose input is wanted."""


@contextmanager
def captured_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, a call of the layer stores its input and ends the forward pass with `Reached`."""
    caught: list[Tensor] = []

    def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
        caught.append(given[0])
        raise Reached

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield caught
    finally:
        handle.remove()


def layer_input(target: Target, site: Site, pixels: Tensor) -> Tensor:
    """φ(x): the input of the site's layer for these pixels; the rest of the model is not run."""
    return input_of(target, site.name, pixels)


def input_of(target: Target, layer: str, pixels: Tensor) -> Tensor:
    """A layer's input for these pixels; the rest of the model is not run."""
    with captured_input(target.model.get_submodule(layer)) as caught, suppress(Reached):
        target.run_traced(pixels)
    if not caught:
        raise SiteError(f"the model does not call {layer} on this input")
    return caught[0]


def measured_input(target: Target, layer: str, pixels: Tensor) -> Tensor:
    """`input_of` in evaluation mode, without gradients, as float64 on the CPU."""
    with evaluation_mode(target.model), torch.no_grad():
        return input_of(target, layer, pixels).double().cpu()


def respond(site: Site, target: Target, features: Tensor, detectors: Tensor, group: int = 0) -> Tensor:
    """Responses ``v·φ`` of detectors ``(D, d)`` at every position: ``(N, D, *grid)``.

    A convolution is run with the detectors as its weights, so its own stride, padding and dilation apply. In a grouped
    convolution the detectors see the inputs of one group.
    """
    layer = site.layer(target.model)
    detectors = detectors.to(features.device, features.dtype)
    if site.kind == "linear":
        return torch.nn.functional.linear(features, detectors).movedim(-1, 1)
    if site.kind == "transposed":
        return torch.einsum("nchw,dc->ndhw", features, detectors)
    count = len(detectors)
    kernels = detectors.view(count, *raw(layer, "weight").shape[1:]).repeat(
        site.groups, *(1,) * (raw(layer, "weight").dim() - 1)
    )
    parameters = {"weight": kernels}
    if has(layer, "bias"):
        parameters["bias"] = kernels.new_zeros(len(kernels))
    maps: Tensor = functional_call(layer, parameters, (features,))
    return maps[:, group * count : (group + 1) * count]


def at_tap(layer: nn.Module, position: tuple[int, ...], tap: tuple[int, ...]) -> tuple[int, ...]:
    """The output position to which a tap of a transposed convolution writes what it reads at an input position."""
    assert isinstance(layer, nn.ConvTranspose2d)
    padding: tuple[int, ...] = tuple(int(p) for p in layer.padding)
    steps = zip(position, layer.stride, tap, layer.dilation, padding, strict=True)
    return tuple(i * s + t * d - p for i, s, t, d, p in steps)


# --- squeeze-and-excite blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """The nodes of one block: the map it squeezes, its two dense layers, and the product with the gates.

    ``shift`` is the layer whose output is added to the channels, or None; ``output`` is the block's last node.
    """

    squeezed: fx.Node
    first: fx.Node
    second: fx.Node
    product: fx.Node
    hidden: Activation
    gate: Activation
    shift: fx.Node | None
    output: fx.Node


def gate_level(gate: Activation, gain: Tensor) -> Tensor:
    """The input for which a gate takes this value."""
    assert gate.inverse is not None
    return gate.inverse(gain)


def find_blocks(part: TracedPart) -> dict[fx.Node, Block]:
    """Every block, by the node that multiplies by its gates."""
    found = (block_at(part, node) for node in part.graph.nodes if is_product(part, node))
    return {block.product: block for block in found if block is not None}


def block_at(part: TracedPart, product: fx.Node) -> Block | None:
    """The block whose gates a product applies; None if the product is something else."""
    shapes = part.shapes
    factors = [a for a in product.args if isinstance(a, fx.Node) and len(shapes.get(a, ())) == 4]
    if len(factors) != 2 or shapes[factors[0]][1] != shapes[factors[1]][1]:
        return None
    opened, squeezed = sorted(factors, key=lambda node: shapes[node][2] * shapes[node][3])
    if shapes[opened][2:] != (1, 1):
        return None
    gate_node = _through_reshapes(part, opened)
    gate = op_of(part, gate_node).activation
    if gate is None or not gate.is_gate:
        return None
    second = _through_reshapes(part, gate_node.all_input_nodes[0])
    hidden_node = _through_reshapes(part, second.all_input_nodes[0]) if _is_dense(part, second) else second
    hidden = op_of(part, hidden_node).activation
    if hidden is None or not hidden.is_for_hidden_units:
        return None
    first = _through_reshapes(part, hidden_node.all_input_nodes[0])
    if not _is_dense(part, first):
        return None
    pooled = _through_reshapes(part, first.all_input_nodes[0])
    if op_of(part, pooled).kind not in KEEPING or pooled.all_input_nodes[0] is not squeezed:
        return None
    shift = _shift_after(part, product, hidden_node)
    return Block(squeezed, first, second, product, hidden, gate, shift, next(iter(product.users)) if shift else product)


def _shift_after(part: TracedPart, product: fx.Node, hidden: fx.Node) -> fx.Node | None:
    """The dense layer over the hidden units whose output is added to the product; None if there is none."""
    users = list(product.users)
    if len(users) != 1 or not is_sum(part, users[0]):
        return None
    for other in users[0].all_input_nodes:
        added = _through_reshapes(part, other)
        if other is not product and _is_dense(part, added) and added.all_input_nodes[0] is hidden:
            return added
    return None


def _through_reshapes(part: TracedPart, node: fx.Node) -> fx.Node:
    while is_reshape(part, node):
        node = node.all_input_nodes[0]
    return node


def _is_dense(part: TracedPart, node: fx.Node) -> bool:
    """A Linear or ungrouped 1×1 Conv2d, with a bias to write to."""
    leaf = part.leaf(node) if node.op == "call_module" else None
    if not (isinstance(leaf, nn.Linear) or (isinstance(leaf, nn.Conv2d) and leaf.groups == 1)):
        return False
    return has(leaf, "bias") and (isinstance(leaf, nn.Linear) or tuple(leaf.kernel_size) == (1, 1))
