"""Recording: the graph of one run, for modules that torch.fx can't trace.

fx runs a module on proxies, which have no values: it stops at `if` on a shape, at ``*args``, at outputs that are
dataclasses. Here the module runs on a real example instead. A `TorchFunctionMode` sees every PyTorch function that is
called, hooks see when a layer starts and ends, and each result is one node:

    layer(x)            call_module
    torch.f(x), x.f()   call_function, call_method
    x.shape, len(x)     the example's numbers, no node

Such a graph is for analysis only. It contains the example's sizes, so it is not run on other batches. A module whose
path depends on the image's values is refused, since another image may take another path.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from stainlock.target import entries_in, logits_in

# Methods that turn tensors into Python or NumPy values, which can't be followed further.
_DECIDING = {"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy", "__array__"}
_OPERATORS: dict[str, Callable[..., Any]] = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}
_REVERSED = {"__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rpow__": operator.pow}


class DependsOnValues(Exception):
    """The path through a module depends on the image's values, so one run does not show all of it."""


def unseen(*sources: Any) -> Any:
    """Placeholder in a graph for code that made a tensor unseen by the recorder: compiled functions, other packages."""
    raise NotImplementedError("a recorded graph is for analysis, it can't be run")


class Recorder(TorchFunctionMode):
    """The graph of one run of a module, and the shape of each node's output."""

    def __init__(self, module: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.module, self.is_leaf = module, is_leaf
        self.graph = fx.Graph()
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}
        self._nodes: dict[int, fx.Node] = {}  # by the id of their tensor
        self._kept: list[Any] = []  # kept alive so that no id is reused
        self._attributes = dict(_attributes(module))
        self._from_image: set[fx.Node] = set()
        self._stack: dict[str, tuple[str, type[nn.Module]]] = {}
        self._within_leaf = 0

    def record(self, *inputs: Any) -> fx.Graph:
        for i, value in enumerate(inputs):
            if isinstance(value, Tensor):
                self._remember(value, self.graph.placeholder(f"x{i}" if i else "x"))
        self._from_image.add(next(iter(self.graph.nodes)))
        with torch.no_grad(), self._listening(), self:
            output = self.module(*inputs)
        self.graph.output(self._packed(logits_in(output)))
        return self.graph

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not self._within_leaf and name in _DECIDING and self._nodes.get(id(args[0])) in self._from_image:
            raise DependsOnValues(f"{name.strip('_')} of a value that depends on the image")
        output = func(*args, **kwargs)
        if self._within_leaf:
            return output
        if name == "__setitem__":
            self._add(args[0], *_call(func, name, args), kwargs)
        elif _holds_tensor(output):
            self._add(output, *_call(func, name, args), kwargs)
        return output

    def _add(self, output: Any, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        given: Any = map_aggregate((args, kwargs), self._node_or_value)
        node = self.graph.create_node(op, target, tuple(given[0]), dict(given[1]))
        node.meta["nn_module_stack"] = dict(self._stack)
        if any(source in self._from_image for source in node.all_input_nodes):
            self._from_image.add(node)
        self._remember(output, node)
        base = output._base if isinstance(output, Tensor) and args and output is args[0] else None
        if base is not None and id(base) in self._nodes:  # a tensor that was written to through a view
            self._nodes[id(base)] = self.graph.call_function(unseen, (self._nodes[id(base)], node))
            self._from_image.add(self._nodes[id(base)])
        return node

    def _remember(self, output: Any, node: fx.Node) -> None:
        """Map an output tensor to its node. Each tensor in a tuple or other container gets its own node."""
        self._kept.append(output)
        if isinstance(output, Tensor):
            self._nodes[id(output)] = node
            self.shapes[node] = tuple(output.shape)
            return
        for key, value in entries_in(output):
            if _holds_tensor(value):
                own = self.graph.call_function(operator.getitem, (node, key))
                if node in self._from_image:
                    self._from_image.add(own)
                self._remember(value, own)

    def _node_or_value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            name = self._attributes.get(id(value))
            if name is not None:
                self._remember(value, self.graph.get_attr(name))
            else:
                self._add(value, "call_function", unseen, (self._kept[0],), {})
        return self._nodes[id(value)]

    def _packed(self, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._node_or_value(output)
        return {key: self._packed(value) for key, value in entries_in(output) if _holds_tensor(value)}

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Hooks that notice when each module starts and ends; what happens inside a layer is not recorded."""
        calls = iter(range(1_000_000_000))

        def starts(name: str, leaf: bool) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                if not self._within_leaf:
                    self._stack[f"{name}@{next(calls)}"] = (name, type(module))
                self._within_leaf += leaf

            return hook

        def ends(name: str, leaf: bool) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                self._within_leaf -= leaf
                if not self._within_leaf:
                    if leaf:
                        self._add(output, "call_module", name, args, kwargs)
                    self._stack.popitem()

            return hook

        with ExitStack() as hooks:
            for name, module in self.module.named_modules():
                leaf = self.is_leaf(module) or (not name and not list(module.children()))
                hooks.enter_context(module.register_forward_pre_hook(starts(name, leaf), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(ends(name, leaf), with_kwargs=True))
            yield


def _call(func: Any, name: str, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """A call in fx's terms: an operator, a tensor method by its name, or a function."""
    if name == "__get__":  # a property such as x.T
        return "call_function", getattr, (args[0], func.__self__.__name__)
    if name in _REVERSED:
        return "call_function", _REVERSED[name], (args[1], args[0])
    if name in _OPERATORS:
        return "call_function", _OPERATORS[name], args
    if getattr(torch.Tensor, name, None) is func or type(func).__name__ == "method_descriptor":
        return "call_method", name, args
    return "call_function", func, args


def _attributes(module: nn.Module) -> Iterator[tuple[int, str]]:
    """The id and name of every tensor that a module holds, as a parameter, buffer or plain attribute."""
    for prefix, inner in module.named_modules():
        own = {**inner._parameters, **inner._buffers, **vars(inner)}
        for name, value in own.items():
            for tensor in _tensors(value):
                yield id(tensor), f"{prefix}.{name}" if prefix else name


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for item in value:
            yield from _tensors(item)
    elif type(value) is dict:
        for item in value.values():
            if isinstance(item, Tensor):
                yield item


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or any(_holds_tensor(item) for _, item in entries_in(value))
