"""Sites: the layers that a detector can be written into, and what follows each of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import is_parametrized

from stainlock.network.activations import Activation, activation_of_function, activation_of_module
from stainlock.network.channels import Followers, Reader, Reason, Stop, follow
from stainlock.network.fields import Field, receptive_fields
from stainlock.network.near import Near, near_fields
from stainlock.network.trace import TracedPart
from stainlock.target import Target
from stainlock.tensors import has, raw

Kind = Literal["linear", "convolution", "transposed"]
_LAYERS: dict[type[nn.Module], Kind] = {
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
    - ``near``: what a position sees while the gates of squeeze-and-excite blocks before it are held constant, if that
      is less than ``patch``.

    >>> site = sl.analyse(target).site("3")
    >>> site.kind, site.dimension, site.channels, site.problem
    ('convolution', 288, 64, None)
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
    stops: tuple[Stop, ...]
    field: Field | None
    patch: tuple[int, ...]
    problem: str | None
    additive_problem: str | None
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


def weight_rows(weight: Tensor, kind: Kind) -> Tensor:
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
        weight = module._parameters.get("weight")
        if weight is not None:
            holders[id(weight)].append(name)
    return holders


def _kind(layer: nn.Module) -> Kind | None:
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


def _grid(kind: Kind, output: tuple[int, ...], given: tuple[int, ...]) -> tuple[int, ...] | None:
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

    def record(name: str, kind: Kind | None) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
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
    """Whether twice the weight gives twice the output. It does not if a layer standardises its weight first."""
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
    return bool(torch.allclose(2 * once, twice, rtol=1e-2, atol=1e-2 * float(once.abs().max())))


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
    additive_problem = None
    if is_parametrized(layer, "weight") or "weight" not in layer._parameters:
        additive_problem = "its weight is computed by a parametrisation: remove that first"
    elif not uses_weight_as_it_is(layer):
        additive_problem = f"it is a {type(layer).__name__}, which changes its weight before using it: use another"
    elif trouble is not None:
        additive_problem = trouble
    elif kind == "transposed" and groups > 1:
        additive_problem = "grouped transposed convolutions are not supported"
    elif dimension < MINIMUM_DIMENSION:
        additive_problem = f"dimension {dimension} is below {MINIMUM_DIMENSION}: natural inputs reach any direction"
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
        tuple(followers.stops), seen, patch, problem, additive_problem,
    )  # fmt: skip
