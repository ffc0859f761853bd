"""The hooks of a keyed lock: a reader before the module that takes the images, and a gate before every gated layer.

Every parameter keeps its name, and fusing or quantising a layer in eager mode keeps its gate (torch.fx needs
`modules`). The reader reads the bits of every image of a batch and stores the gates' permutations in a frame for this
thread and this call of the model.

If all images of a batch carry the same key, the columns of a small layer are put back in order instead of its input,
W'[:, π⁻¹]: this moves fewer values than reordering large maps.
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
from stainlock.gating.schedule import Schedule, row_orders


class Reader:
    """The hook that reads the bits, before the module that takes the images."""

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
        """Store the permutations of these images for the gates; return what the network is to see of the images."""
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
        with torch.inference_mode(False), torch.no_grad():  # cached tensors may be used with gradients later
            bits = bits.clone()
            if len(bits) > 1 and bool((bits == bits[:1]).all()):
                bits = bits[:1]
            return FRAMES.permutations(self.schedule, bits)

    def _check(self, inputs: Tensor) -> None:
        if self.layout.form == "entries":
            if inputs.dim() < 2 or inputs.shape[1] <= self.layout.bits:
                raise ValueError(
                    f"expected inputs (N, d, ...) with the key's {self.layout.bits} entries after the others, got"
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
    """The hook before the whole model: starts the frame of a new call."""

    def __init__(self, lock: str) -> None:
        self.lock = lock

    def __call__(self, module: nn.Module, args: Any) -> None:
        FRAMES.stacks.setdefault(self.lock, []).append(None)


class Closing:
    """The hook after the whole model: ends the call's frame, even after an error."""

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
    """The hook before a scattered layer. While operations are being recorded it leaves the input as it is. The hook
    after the layer then computes the output with the right weights, and the layer's own output is not used."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        if is_traced():
            return None
        x, *others = args
        return (Scattered.of(x, self.orders().rows(self.number, self.gated.rows)), *others)


class ScatterResult(Gate):
    """The hook after a scattered layer."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any = None) -> Any:
        if not is_traced():
            return output
        weight = module.get_parameter(self.gated.parameter)
        orders = row_orders(self.orders().orders[self.number], self.gated.rows)
        return with_own_weights(module, args[0], gathered(weight, orders))


class AttentionGate(Gate):
    """The hook before an attention layer, whose query, key and value are projected by the columns of one parameter."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        order, kwargs = self.orders().orders[self.number], {} if kwargs is None else kwargs
        seen: dict[int, Tensor] = {}  # a tensor passed three times stays one tensor

        def through(x: Tensor) -> Tensor:
            if id(x) not in seen:
                seen[id(x)] = permuted(x, order, self.gated)
            return seen[id(x)]

        given = tuple(through(x) for x in args[:3]) + args[3:]
        return given, {name: through(x) if name in ("query", "key", "value") else x for name, x in kwargs.items()}


def attach(
    model: nn.Module, lock: str, layout: Layout, schedule: Schedule, gates: tuple[Gated, ...], reader: str
) -> None:
    """Add a lock's hooks to a model; ``reader`` names the module that takes the images."""
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
        else:  # without keywords: quantising a layer keeps its hooks, but not that flag
            layer.register_forward_pre_hook(Gate(lock, number, gated))


def detach(model: nn.Module, lock: str) -> None:
    """Remove a lock's hooks."""
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
