"""A traced model cut at a layer: the part before it runs once, the part after it once per edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, fx, nn

from stainlock.network.graph import TracedPart
from stainlock.network.network import Network, Site
from stainlock.network.ops import Kind, op_of
from stainlock.target import Target


class Cut(Protocol):
    """``before`` maps pixels to the values that are ``live`` at the cut, ``after`` maps those to the model's output.

    ``site`` is the layer where models begin to differ, if its channels are independent of each other. ``activations``
    are its channels, computed as far as they stay independent: after the batch norm, if ``norm`` names one, and the
    activation.
    """

    site: Site | None
    norm: str | None

    def before(self, pixels: Tensor) -> Any: ...

    def activations(self, live: Any) -> Tensor: ...

    def after(self, live: Any) -> Any: ...


class TracedCut:
    """A cut of the traced graph. Every node before the layer runs once; only values used later are kept.

    The graph is interpreted: each call goes to the model's own modules, with their current weights.
    """

    def __init__(self, working: Target, network: Network, changed: set[str]) -> None:
        (part,) = network.parts
        nodes = list(part.graph.nodes)
        self.working = working
        first = next((n for n in nodes if _tensors(part, n) & changed), nodes[-1])
        self.site = _told_apart(network, part, first)
        layer = _to_activation(part, first, self.site) if self.site else []
        called = [part.path(n) for n in layer if n.op == "call_module"]
        self.norm = self.site.norm if self.site and self.site.norm in called else None
        index = nodes.index(first)
        earlier, later = nodes[:index], nodes[index:]
        live = [n for n in earlier if not n.users.keys() <= set(earlier)]
        body = working.traced
        self._before = _interpreter(body, [], earlier, live)
        self._after = _interpreter(body, live, later, [])
        self._activations = _interpreter(body, live, layer, layer[-1:])

    def before(self, pixels: Tensor) -> list[Any]:
        inputs = [self.working.normalise(pixels)]
        if not self.working.part:
            inputs += self.working.extra_inputs
        return list(self._before.run(*inputs))

    def activations(self, live: list[Any]) -> Tensor:
        (maps,) = self._activations.run(*live)
        assert isinstance(maps, Tensor)
        return maps

    def after(self, live: list[Any]) -> Any:
        return self._after.run(*live)


def _tensors(part: TracedPart, node: fx.Node) -> set[str]:
    """Names of the parameters and buffers that a node reads."""
    if node.op == "get_attr":
        return {part.path(node)}
    if node.op != "call_module":
        return set()
    leaf, path = part.leaf(node), part.path(node)
    own = [*leaf.named_parameters(remove_duplicate=False), *leaf.named_buffers(remove_duplicate=False)]
    return {f"{path}.{name}" for name, _ in own}


def _told_apart(network: Network, part: TracedPart, node: fx.Node) -> Site | None:
    """The site of a node, if it is a layer whose channels do not depend on each other's weights; otherwise None."""
    site = network.sites.get(part.path(node)) if node.op == "call_module" else None
    calls = [n for n in part.graph.nodes if n.op == "call_module" and n.target == node.target]
    grouped = site is not None and site.kind == "transposed" and site.groups > 1
    return site if len(calls) == 1 and not grouped else None


def _to_activation(part: TracedPart, layer: fx.Node, site: Site) -> list[fx.Node]:
    """The layer, its batch norm and its activation: up to there, channels are independent.

    A site whose norm also serves other layers has no activation.
    """
    nodes, norm = [layer], site.norm
    while site.activation is not None and len(nodes[-1].users) == 1:
        (user,) = nodes[-1].users
        leaf = part.leaf(user) if user.op == "call_module" else None
        is_norm = norm is not None and leaf is not None and part.path(user) == norm
        acts = norm is None and op_of(part, user).activation is not None
        passes = op_of(part, user).kind is Kind.NOTHING
        if user.all_input_nodes != nodes[-1:] or not (is_norm or acts or passes):
            break
        nodes.append(user)
        if acts or (is_norm and op_of(part, user).activation is not None):
            break
        norm = None if is_norm else norm
    return nodes


def _interpreter(
    body: nn.Module, given: Sequence[fx.Node], nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]
) -> fx.Interpreter:
    """Runs some nodes of a graph on given values; returns the wanted nodes' values, or the graph's output."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda used: copies[used])
    if not nodes or nodes[-1].op != "output":
        graph.output(tuple(copies[node] for node in wanted))
    return fx.Interpreter(body, graph=graph)
