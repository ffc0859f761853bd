"""Sites: the layers a detector can live in, and what follows each of them."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from stainlock.errors import ModelError, SiteError
from stainlock.network.activations import Activation, activation_of_function, activation_of_module
from stainlock.network.fields import Field, receptive_fields
from stainlock.network.graph import Channel, Reader, TracedPart, follow, node_shapes, trace
from stainlock.target import Target, evaluation_mode
from stainlock.tensors import has, raw

Kind = Literal["linear", "convolution", "transposed"]
_LAYERS: dict[type[nn.Module], Kind] = {
    nn.Linear: "linear",
    nn.Conv2d: "convolution",
    nn.ConvTranspose2d: "transposed",
}
# Below this a random direction is no secret: natural features reach any direction of so small a space.
MINIMUM_DIMENSION = 16


@dataclass(frozen=True)
class Site:
    """A layer whose channels a detector can be written into, with the affine map and activation after it.

    The pre-activation of channel k is ``g·(w_k·φ(x) + c_k) + h``; ``norm`` names the batch norm that holds g and
    h, if there is one. ``grid`` is the shape of the layer's positions: rows and columns, or tokens.
    ``patch`` is the part of the input that one position sees at most. ``problem`` says why a silent detector
    can't go here, ``additive_problem`` why not even an additive stain can.
    """

    name: str
    kind: Kind
    dimension: int
    channels: int
    groups: int
    grid: tuple[int, ...]
    norm: str | None
    activation: Activation | None
    readers: tuple[Reader, ...]
    stopped: tuple[str, ...]
    field: Field | None
    patch: tuple[int, ...]
    problem: str | None
    additive_problem: str | None

    def layer(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.name)

    def rows(self, model: nn.Module) -> Tensor:
        """The layer's weights as row vectors of the detector's dimension, one or (transposed) several a channel."""
        return weight_rows(raw(self.layer(model), "weight"), self.kind)

    def group_of(self, channel: int) -> int:
        return channel // (self.channels // self.groups)


def weight_rows(weight: Tensor, kind: Kind) -> Tensor:
    """Rows that meet the layer's input; a transposed kernel has one for each tap (the paper's c×1×1 form)."""
    if kind == "transposed":
        return weight.permute(1, 2, 3, 0).flatten(0, 2)
    return weight.flatten(1)


@dataclass
class Analysis:
    """A target, traced once: its sites by name, and the traced parts for whoever follows channels further."""

    target: Target
    parts: list[TracedPart]
    sites: dict[str, Site]
    shapes: list[dict[fx.Node, tuple[int, ...]]] = field(default_factory=list)

    def site(self, name: str) -> Site:
        if name in self.sites:
            return self.sites[name]
        modules = dict(self.target.model.named_modules())
        if name in modules:
            raise SiteError(
                f"{name} is a {type(modules[name]).__name__}: expected a Linear, Conv2d or ConvTranspose2d"
                " that the model calls; `stainlock inspect` lists them"
            )
        close = difflib.get_close_matches(name, self.sites, 3, 0.4)
        raise SiteError(
            f"no site {name!r}; {'did you mean ' + ', '.join(close) if close else 'see stainlock inspect'}?"
        )


def analyse(target: Target) -> Analysis:
    """Trace the model and describe every Linear, Conv2d and ConvTranspose2d it calls."""
    example = target.normalise(torch.full((1, *target.input_shape), sum(target.bounds) / 2))
    with evaluation_mode(target.model), torch.no_grad(), _running_told(target):
        parts = trace(target.traced, target.part)
        if len(parts) == 1 and parts[0].name == target.part:
            shapes = [node_shapes(parts[0], (example, *_extra(target)))]
            called, calls = _called_layers(parts[0], shapes[0])
            constant: set[str] = set()
        else:  # the parts' own inputs are inside the model: look at what its layers are given
            shapes = [{} for _ in parts]
            called, calls, constant = _observed_layers(target, example)
    sites: dict[str, Site] = {}
    holders = _holders_of_weights(target.model)
    for part, part_shapes in zip(parts, shapes, strict=True):
        image = next(iter(part.graph.nodes))
        fields = receptive_fields(part, part_shapes, image) if part_shapes else {}
        for node in part.graph.nodes:
            if node.op != "call_module":
                continue
            name, layer = part.path(node), part.leaf(node)
            if _kind(layer) and name in called and name not in sites:
                channel = follow(part, node, part_shapes)
                if channel.norm is not None and calls[channel.norm] > 1:
                    channel.activation = None
                    channel.stopped.insert(0, f"{channel.norm}, which other layers use too")
                trouble = None
                if calls[name] > 1:
                    trouble = "the model calls this layer more than once"
                elif name in constant or (fields and node not in fields):
                    trouble = "what it is given does not depend on the image"
                elif called[name] is None:
                    trouble = "it is given several rows an image, folded into the batch"
                elif others := [n for n in holders[id(layer._parameters.get("weight"))] if n != name]:
                    trouble = f"its weight is shared with {others[0]}"
                sites[name] = _site(target, name, layer, channel, called[name] or (), fields.get(node), trouble)
            elif isinstance(layer, nn.TransformerEncoder | nn.TransformerEncoderLayer):
                for inner_name, inner, channel in _transformer_layers(name, layer):
                    grid = called.get(inner_name) or part_shapes.get(node, ())[1:-1]
                    trouble = None if _batch_first(layer) else "its tokens come before the batch (batch_first=False)"
                    sites[inner_name] = _site(target, inner_name, inner, channel, grid, None, trouble)
    if not sites:
        raise ModelError(
            f"{type(target.model).__name__} has no Linear, Conv2d or ConvTranspose2d that can be reached by tracing"
        )
    return Analysis(target, parts, sites, shapes)


@contextmanager
def _running_told(target: Target) -> Iterator[None]:
    """A model runs arbitrary code, which fails in arbitrary ways on an input of the wrong size."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        given = "×".join(str(n) for n in target.input_shape)
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise ModelError(
            f"the model does not run on an input of {given} ({why}): set Target(input_shape=...)"
        ) from error


def _holders_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """Which layers hold each weight: tied ones have several."""
    holders: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        if weight is not None:
            holders[id(weight)].append(name)
    return holders


def _kind(layer: nn.Module) -> Kind | None:
    return next((kind for cls, kind in _LAYERS.items() if isinstance(layer, cls)), None)


def _extra(target: Target) -> tuple[Any, ...]:
    return target.extra_inputs if not target.part else ()


Grids = dict[str, tuple[int, ...] | None]  # positions of each layer; None where the first axis is not the image


def _called_layers(part: TracedPart, shapes: dict[fx.Node, tuple[int, ...]]) -> tuple[Grids, Counter[str]]:
    """Positions of every layer in the graph, and how often each module is called."""
    grids: Grids = {}
    calls: Counter[str] = Counter()
    for node in part.graph.nodes:
        if node.op == "call_module":
            calls[part.path(node)] += 1
            if (kind := _kind(part.leaf(node))) and node in shapes:
                grids[part.path(node)] = _grid(kind, shapes[node], shapes.get(node.all_input_nodes[0], ()))
    return grids, calls


def _grid(kind: Kind, output: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...] | None:
    if output[0] != 1:
        return None
    if kind == "linear":
        return output[1:-1]
    return given[2:] if kind == "transposed" else output[2:]


def _observed_layers(target: Target, example: Tensor) -> tuple[Grids, Counter[str], set[str]]:
    """The same for the layers that one run of the model calls; and those that are given the same whatever the image."""
    grids: Grids = {}
    calls: Counter[str] = Counter()
    given_values: dict[str, list[Tensor]] = defaultdict(list)

    def record(name: str, kind: Kind | None) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            calls[name] += 1
            if kind is not None:
                grids[name] = _grid(kind, tuple(output.shape), tuple(given[0].shape))
                given_values[name].append(given[0].double().sum())

        return hook

    handles = [layer.register_forward_hook(record(n, _kind(layer))) for n, layer in target.model.named_modules()]
    noise = torch.rand(example.shape, generator=torch.Generator().manual_seed(0)).to(example)
    try:
        for image in (example, example + noise):
            calls.clear()
            target.traced(image) if target.part else target(image)
    finally:
        for handle in handles:
            handle.remove()
    constant = {name for name, values in given_values.items() if len(values) == 2 and values[0] == values[1]}
    return grids, calls, constant


def _batch_first(module: nn.Module) -> bool:
    attentions = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
    return all(m.batch_first for m in attentions)


def _transformer_layers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Linear, Channel]]:
    """PyTorch's own encoder layers don't trace; their feed-forward block is known: linear1, activation, linear2."""
    for inner_name, inner in module.named_modules(prefix=name):
        if isinstance(inner, nn.TransformerEncoderLayer):
            activation = (
                activation_of_module(inner.activation)
                if isinstance(inner.activation, nn.Module)
                else activation_of_function(inner.activation, (), {})
            )
            reader = Reader(f"{inner_name}.linear2", 0, 1)
            yield f"{inner_name}.linear1", inner.linear1, Channel(activation=activation, readers=[reader])


def _site(
    target: Target,
    name: str,
    layer: nn.Module,
    channel: Channel,
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
    additive_problem = None
    if is_parametrized(layer, "weight") or "weight" not in layer._parameters:
        additive_problem = "its weight is computed by a parametrisation: remove that first"
    elif trouble is not None:
        additive_problem = trouble
    elif kind == "transposed" and groups > 1:
        additive_problem = "grouped transposed convolutions are not supported"
    elif dimension < MINIMUM_DIMENSION:
        additive_problem = f"dimension {dimension} is below {MINIMUM_DIMENSION}: natural inputs reach any direction"
    problem = additive_problem
    last = next((why for why in channel.stopped if "output" in why or "gates" in why), None)
    if problem is None and channel.activation is not None and last is not None:
        problem = f"a silent channel would change {last}"
    elif problem is None and channel.activation is None:
        where = next(iter([f"addition {m}" for m in channel.merges] + channel.stopped), "the next layer")
        problem = f"no activation silences a detector before {where}"
    elif problem is None and not has(layer, "bias") and channel.norm is None:
        problem = "the layer has neither bias nor batch norm to hold a threshold"
    return Site(
        name, kind, dimension, channels, groups, grid, channel.norm, channel.activation, tuple(channel.readers),
        tuple(channel.stopped), seen, patch, problem, additive_problem,
    )  # fmt: skip


class _Reached(Exception):
    """Stops a forward pass at the layer whose input is wanted."""


@contextmanager
def captured_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, the first call of the layer stores its input and ends the forward pass with `_Reached`."""
    caught: list[Tensor] = []

    def hook(_: nn.Module, given: tuple[Any, ...]) -> None:
        caught.append(given[0])
        raise _Reached

    handle = layer.register_forward_pre_hook(hook)
    try:
        yield caught
    finally:
        handle.remove()


def layer_input(target: Target, site: Site, pixels: Tensor) -> Tensor:
    """φ(x): what the site's layer is given for these pixels; the rest of the model is not run."""
    return input_of(target, site.name, pixels)


def input_of(target: Target, layer: str, pixels: Tensor) -> Tensor:
    """What a layer is given for these pixels, found by running the model no further."""
    with captured_input(target.model.get_submodule(layer)) as caught, suppress(_Reached):
        target.run_traced(pixels)
    if not caught:
        raise SiteError(f"the model does not call {layer} on this input")
    return caught[0]


def measured_input(target: Target, layer: str, pixels: Tensor) -> Tensor:
    """The same as numbers: in evaluation mode, without gradients, in float64 on the CPU."""
    with evaluation_mode(target.model), torch.no_grad():
        return input_of(target, layer, pixels).double().cpu()
