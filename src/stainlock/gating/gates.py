"""The hooks of a keyed lock: a reader before the module that is given the images, and a gate before every gated layer.

Every parameter keeps its name, and fusing or quantising a layer takes its gate along. The reader reads the bits of
every image of a batch and leaves the gates' permutations in a frame, which belongs to the thread and to this call of
the model.

Where all images of a batch carry one key, the columns of a small layer are put back in order instead of its inputs,
W'[:, π⁻¹]: that moves fewer values than reordering large maps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stainlock.errors import ModelError
from stainlock.gating.frames import FRAMES, Orders, is_traced
from stainlock.gating.gated import Gated, gathered, permuted, with_own_weights
from stainlock.gating.own_weights import Reordered, Scattered, columns_are_fewer
from stainlock.gating.reader import Layout
from stainlock.gating.schedule import Schedule


class Reader:
    """The hook that reads the bits, before the module that is given the images."""

    def __init__(self, lock: str, layout: Layout, schedule: Schedule) -> None:
        self.lock, self.layout, self.schedule = lock, layout, schedule

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(inputs, Tensor):
            raise ModelError(f"a keyed lock reads its bits from a tensor of images, got {type(inputs).__name__}")
        seen = self.read(inputs)
        if self.layout.carrier == "patch":
            return None
        return ((seen, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): seen})

    def read(self, inputs: Tensor) -> Tensor:
        """Leave the permutations of these images to the gates; what the network is to see of them."""
        self._check(inputs)
        found = self._permutations(self.layout.read(inputs))
        stack = FRAMES.stacks.setdefault(self.lock, [])
        if stack:
            stack[-1] = found
        else:  # a part of the model is run by itself
            stack.append(found)
        return self.layout.cut(inputs)

    def _permutations(self, bits: Tensor) -> Orders:
        if is_traced():
            return Orders(self.schedule.permutations(bits))
        with torch.inference_mode(False), torch.no_grad():  # what is kept may be used with gradients later
            bits = bits.clone()
            if len(bits) > 1 and bool((bits == bits[:1]).all()):
                bits = bits[:1]
            return FRAMES.permutations(self.schedule, bits)

    def _check(self, inputs: Tensor) -> None:
        if self.layout.form == "entries":
            if inputs.dim() < 2 or inputs.shape[1] <= self.layout.bits:
                raise ValueError(
                    f"expected inputs (N, d, ...) with the key's {self.layout.bits} entries behind the others, got"
                    f" {tuple(inputs.shape)}"
                )
            return
        rows, columns = self.layout.size
        if inputs.dim() not in (4, 5) or inputs.shape[-2] < rows or inputs.shape[-1] < columns:
            raise ValueError(
                f"expected images (N, C, H, W) or video (N, C, T, H, W) of at least the patch's {rows}×{columns}"
                f" pixels, got {tuple(inputs.shape)}"
            )


class Opening:
    """The hook before the whole model: a new call."""

    def __init__(self, lock: str) -> None:
        self.lock = lock

    def __call__(self, module: nn.Module, args: Any) -> None:
        FRAMES.stacks.setdefault(self.lock, []).append(None)


class Closing:
    """The hook behind the whole model, which runs whatever happened inside: the call is over."""

    def __init__(self, lock: str) -> None:
        self.lock = lock

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        stack = FRAMES.stacks.get(self.lock)
        if stack:
            stack.pop()


class Gate:
    """The hook before a gated layer."""

    def __init__(self, lock: str, number: int, gated: Gated) -> None:
        self.lock, self.number, self.gated = lock, number, gated

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        orders, (x, *others) = self.orders(), args
        order = orders.orders[self.number]
        if order.shape[0] == 1 and columns_are_fewer(module, x) and not is_traced():
            return (Reordered.of(x, order, orders.inverse(self.number), self.gated), *others)
        return (permuted(x, order, self.gated), *others)

    def orders(self) -> Orders:
        """The permutations in this call of the model."""
        stack = FRAMES.stacks.get(self.lock)
        if not stack or stack[-1] is None:
            raise ModelError(f"{self.gated.layer} has a keyed lock's gate: run the whole model, which reads the patch")
        return stack[-1]


class ScatterGate(Gate):
    """The hook before a scattered layer. Where operations are recorded it leaves the input as it is, and the hook
    behind the layer gives what the right weights give; what the others gave is then not used by anything."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        pools, (x, *others) = self.orders().orders[self.number], args
        return None if is_traced() else (Scattered.of(x, pools), *others)


class ScatterResult(Gate):
    """The hook behind a scattered layer."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> Any:
        if not is_traced():
            return output
        weight = module.get_parameter(self.gated.parameter)
        return with_own_weights(module, args[0], gathered(weight, self.orders().orders[self.number]))


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
        elif gated.form == "scatter":
            layer.register_forward_pre_hook(ScatterGate(lock, number, gated))
            layer.register_forward_hook(ScatterResult(lock, number, gated))
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
