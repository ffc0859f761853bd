"""Tracing: a module as a graph of operations, by torch.fx or, if that fails, by recording one run.

The graph is for analysis only; edits are made to the original `nn.Module`. A module may be called several times (a
ResNet block uses one ReLU in two places), so the analysis is about nodes, not modules. fx runs the module's code on
proxies, which modules may keep in caches, so it gets a copy of the module that shares its tensors.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from stainlock.errors import ModelError
from stainlock.network.activations import is_activation
from stainlock.network.norms import is_batch_norm
from stainlock.network.recorder import DependsOnValues, Recorder
from stainlock.tensors import copied

# Modules that count as one operation, including subclasses in other packages (timm has many).
_LEAVES = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
Shapes = dict[fx.Node, tuple[int, ...]]


class Tracer(fx.Tracer):
    """`fx.Tracer` that keeps layers whole even when a package subclasses them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_layer(m) or super().is_leaf_module(m, module_qualified_name)


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
    """A copy of a module's structure and attributes around the same parameters and buffers."""
    return copied(module, [*module.parameters(), *module.buffers()])


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
