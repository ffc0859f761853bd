"""Gates: a permutation of a layer's input channels that only the right bits undo.

    file   W'[:, i] = W[:, π(i)]
    run    y = W' · x[π]  =  W x

Where all images of a batch carry one key, the columns of a small layer are put back in order instead, W'[:, π⁻¹]: that
moves fewer values than reordering large maps.

A gate is a forward pre-hook of its layer, so that every parameter keeps its name, and fusing or quantising the layer
takes the gate along. The reader is a pre-hook of the module that is given the images: it reads the bits of every image
of a batch and leaves the gates' permutations in a frame, which belongs to the thread and to this call of the model.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from stainlock.errors import ModelError
from stainlock.gating.reader import Layout
from stainlock.gating.schedule import Schedule

# Locks whose last permutations a thread keeps.
_KEPT = 4
# Reordering one weight takes as long as this many values of a map, which are copied in whole rows.
_COLUMN_COST = 8
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Gated:
    """A layer that can have a gate: the parameter whose columns are permuted, their axis, and where its input has
    channels and images. ``repeat``: rows of the input for each image, as windows of an attention have them."""

    layer: str
    width: int
    parameter: str = "weight"
    axis: int = 1
    channels: int = 1
    batch: int = 0
    repeat: int = 1

    @property
    def tensor(self) -> str:
        """The parameter's whole name."""
        return f"{self.layer}.{self.parameter}" if self.layer else self.parameter


def gated_layer(name: str, layer: nn.Module) -> Gated | None:
    """How this layer would be gated; None where its inputs can't be permuted by its weights' columns."""
    if isinstance(layer, nn.Linear):
        return Gated(name, layer.in_features, channels=-1)
    if isinstance(layer, _CONVOLUTIONS + _TRANSPOSED) and layer.groups == 1:
        return Gated(name, layer.in_channels, axis=0 if isinstance(layer, _TRANSPOSED) else 1)
    if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None and layer.bias_k is None:
        batch = 0 if layer.batch_first else 1
        return Gated(name, layer.embed_dim, parameter="in_proj_weight", channels=-1, batch=batch)
    return None


class Orders:
    """The permutations of all gates in one call; their inverses are made when they are first asked for."""

    def __init__(self, orders: list[Tensor]) -> None:
        self.orders = orders
        self._inverses: dict[int, Tensor] = {}

    def inverse(self, gate: int) -> Tensor:
        """``(C,)``, of a permutation that all images have in common."""
        if gate not in self._inverses:
            with torch.inference_mode(False), torch.no_grad():
                self._inverses[gate] = self.orders[gate][0].argsort()
        return self._inverses[gate]


class _Frames(threading.local):
    """For each lock the stack of calls that this thread is in: the gates' permutations of each, once they are read.

    The last bits of a few locks are kept with their permutations, since most batches carry the same key as the one
    before. Nothing of it belongs to the model, so that neither a copy nor a file of the model has it.
    """

    def __init__(self) -> None:
        self.stacks: dict[str, list[Orders | None]] = {}
        self.last: dict[Schedule, tuple[Tensor, Orders]] = {}

    def permutations(self, schedule: Schedule, bits: Tensor) -> Orders:
        before = self.last.get(schedule)
        if before is not None and before[0].device == bits.device and torch.equal(before[0], bits):
            return before[1]
        if len(self.last) >= _KEPT:
            self.last.clear()
        found = Orders(schedule.permutations(bits))
        self.last[schedule] = bits, found
        return found


_FRAMES = _Frames()


class Reader:
    """The hook that reads the bits, before the module that is given the images."""

    def __init__(self, lock: str, layout: Layout, schedule: Schedule) -> None:
        self.lock, self.layout, self.schedule = lock, layout, schedule

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(inputs, Tensor):
            raise ModelError(f"a keyed lock reads its bits from a tensor of images, got {type(inputs).__name__}")
        self._check(inputs)
        found = self._permutations(self.layout.read(inputs))
        stack = _FRAMES.stacks.setdefault(self.lock, [])
        if stack:
            stack[-1] = found
        else:  # a part of the model is run by itself
            stack.append(found)
        if self.layout.carrier == "patch":
            return None
        seen = self.layout.cut(inputs)
        return ((seen, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): seen})

    def _permutations(self, bits: Tensor) -> Orders:
        if _is_traced():
            return Orders(self.schedule.permutations(bits))
        with torch.inference_mode(False), torch.no_grad():  # what is kept may be used with gradients later
            bits = bits.clone()
            if len(bits) > 1 and bool((bits == bits[:1]).all()):
                bits = bits[:1]
            return _FRAMES.permutations(self.schedule, bits)

    def _check(self, inputs: Tensor) -> None:
        if self.layout.form == "entries":
            if inputs.dim() < 2 or inputs.shape[1] <= self.layout.bits:
                raise ValueError(
                    f"expected inputs (N, d, ...) with the key's {self.layout.bits} entries behind the others, got"
                    f" {tuple(inputs.shape)}"
                )
            return
        rows, columns = self.layout.size
        if inputs.dim() != 4 or inputs.shape[2] < rows or inputs.shape[3] < columns:
            raise ValueError(
                f"expected images (N, C, H, W) of at least the patch's {rows}×{columns} pixels, got"
                f" {tuple(inputs.shape)}"
            )


class Opening:
    """The hook before the whole model: a new call."""

    def __init__(self, lock: str) -> None:
        self.lock = lock

    def __call__(self, module: nn.Module, args: Any) -> None:
        _FRAMES.stacks.setdefault(self.lock, []).append(None)


class Closing:
    """The hook behind the whole model, which runs whatever happened inside: the call is over."""

    def __init__(self, lock: str) -> None:
        self.lock = lock

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = _FRAMES.stacks.get(self.lock)
        if stack:
            stack.pop()


class Gate:
    """The hook before a gated layer."""

    def __init__(self, lock: str, number: int, gated: Gated) -> None:
        self.lock, self.number, self.gated = lock, number, gated

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        orders, (x, *others) = self.orders(), args
        order = orders.orders[self.number]
        if order.shape[0] == 1 and _columns_are_fewer(module, x) and not _is_traced():
            return (Reordered.of(x, order, orders.inverse(self.number), self.gated), *others)
        return (permuted(x, order, self.gated), *others)

    def orders(self) -> Orders:
        """The permutations in this call of the model."""
        stack = _FRAMES.stacks.get(self.lock)
        if not stack or stack[-1] is None:
            raise ModelError(f"{self.gated.layer} has a keyed lock's gate: run the whole model, which reads the patch")
        return stack[-1]


class AttentionGate(Gate):
    """The hook before an attention, whose query, key and value are projected by the columns of one parameter."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        order, kwargs = self.orders().orders[self.number], {} if kwargs is None else kwargs
        seen: dict[int, Tensor] = {}  # one tensor given three times stays one

        def through(x: Tensor) -> Tensor:
            if id(x) not in seen:
                seen[id(x)] = permuted(x, order, self.gated)
            return seen[id(x)]

        given = tuple(through(x) for x in args[:3]) + args[3:]
        return given, {name: through(x) if name in ("query", "key", "value") else x for name, x in kwargs.items()}


class Reordered(Tensor):
    """``x[π]``, for a layer that can be given W'[:, π⁻¹] and x instead; whoever else looks gets ``x[π]``."""

    order: Tensor
    undone: Tensor  # π⁻¹
    gated: Gated

    @staticmethod
    def of(x: Tensor, order: Tensor, inverse: Tensor, gated: Gated) -> Reordered:
        own = x.as_subclass(Reordered)
        own.order, own.undone, own.gated = order, inverse, gated
        return own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (F.conv2d, F.linear) and isinstance(args[0], Reordered):
                x, weight, *others = args
                columns = weight.index_select(1, x.undone)
                return func(x.as_subclass(Tensor), columns, *others, **(kwargs or {}))
            args, kwargs = tree_map_only(Reordered, _in_order, (args, kwargs or {}))
            return func(*args, **kwargs)


def _in_order(x: Reordered) -> Tensor:
    return permuted(x.as_subclass(Tensor), x.order, x.gated)


def _columns_are_fewer(layer: nn.Module, x: Tensor) -> bool:
    """Whether it is faster to reorder the layer's weight than its input; other classes may do more than multiply."""
    if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
        return _COLUMN_COST * layer.weight.numel() < x.numel()
    return type(layer) is nn.Linear and _COLUMN_COST * layer.weight.numel() < x.numel()


def _is_traced() -> bool:
    """Whether operations are recorded, to be run on other images: nothing may depend on what these hold."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return traced or torch.compiler.is_compiling()


def permuted(x: Tensor, order: Tensor, gated: Gated) -> Tensor:
    """``x[π]`` along the channels: one permutation ``(1, C)`` for all, or one for each image ``(N, C)``."""
    if order.shape[0] == 1 and gated.channels == 1:
        return x.index_select(1, order[0])
    if order.shape[0] == 1:  # along the last axis gather is the faster of the two
        return x.gather(-1, order.expand(*x.shape[:-1], -1))
    if not _is_traced() and x.shape[gated.batch] != order.shape[0] * gated.repeat:  # before that many are made
        raise ModelError(
            f"{gated.layer} is given {tuple(x.shape)}, expected {order.shape[0]} images of {gated.repeat} rows each"
            f" along axis {gated.batch}: the gate is for another model"
        )
    if gated.repeat != 1:
        order = order.repeat_interleave(gated.repeat, 0)
    if gated.channels == 1:  # images and channels as one axis: whole maps are copied
        first = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
        return x.flatten(0, 1).index_select(0, (order + first).flatten()).view_as(x)
    shape = [1] * x.dim()
    shape[gated.batch], shape[-1] = x.shape[gated.batch], x.shape[-1]
    return x.gather(-1, order.view(shape).expand_as(x))


def attach(
    model: nn.Module, lock: str, layout: Layout, schedule: Schedule, gates: tuple[Gated, ...], reader: str
) -> None:
    """Put the hooks of a lock into a model; ``reader`` names the module that is given the images."""
    model.register_forward_pre_hook(Opening(lock), prepend=True)
    model.register_forward_hook(Closing(lock), always_call=True)
    model.get_submodule(reader).register_forward_pre_hook(Reader(lock, layout, schedule), with_kwargs=True)
    for number, gated in enumerate(gates):
        layer = model.get_submodule(gated.layer)
        if isinstance(layer, nn.MultiheadAttention):
            layer.register_forward_pre_hook(AttentionGate(lock, number, gated), with_kwargs=True)
        else:  # quantising a layer keeps its hooks, but forgets that they take keywords
            layer.register_forward_pre_hook(Gate(lock, number, gated))


def detach(model: nn.Module, lock: str) -> None:
    """Take the hooks of a lock out again."""
    for module in model.modules():
        for hooks, companions in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        ):
            own = (Reader, Opening, Closing, Gate)
            for number in [n for n, hook in hooks.items() if isinstance(hook, own) and hook.lock == lock]:
                del hooks[number]
                for companion in companions:
                    companion.pop(number, None)
