"""Network: a model, traced once, with its graph and sites. Stains, locks, certificates and attacks all use it."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from stainlock.errors import ModelError, SiteError
from stainlock.network.activations import Activation
from stainlock.network.blocks import Block, find_blocks
from stainlock.network.norms import is_batch_norm
from stainlock.network.ops import Kind, leading_padding, op_of, repeats_positions
from stainlock.network.sites import Site, find_sites
from stainlock.network.trace import Shapes, TracedPart, trace, tracing_problem
from stainlock.target import Target, check_editable, check_target, evaluation_mode, running_on
from stainlock.tensors import has

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
    example = target.normalise(torch.full((1, *target.input_shape), sum(target.bounds) / 2))
    with evaluation_mode(target.model), torch.no_grad(), running_on(target):
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
        self.measured: dict[str, tuple[Tensor, Tensor]] = {}  # cache of `stainlock.channel_cost`
        self.steps: dict[tuple[fx.Node, fx.Node], Any] = {}  # cache of `stainlock.network.signals`

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
        node: Any = output.args[0]
        while isinstance(node, fx.Node) and self.kind(node) is Kind.NOTHING:
            node = node.args[0]
        leaf = self.leaf(node) if isinstance(node, fx.Node) else None
        ends = isinstance(leaf, nn.Linear) and has(leaf, "bias") and len(self.shapes[node]) == 2
        return node if ends and not self.target.part else None

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
