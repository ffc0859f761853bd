"""What a position sees near it, while the gates of squeeze-and-excite blocks are held constant.

After a squeeze-and-excite block every position sees the whole image, but far parts only through a few gates,

    y[c, i] = x[c, i] · s_c(mean over all positions of x).

If s is held at its value for one image, y[c, i] depends only on the pixels near i, and a trigger can be searched on a
crop of the image. The trigger itself leads to other gates, so its response is measured in the whole network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from stainlock.network.fields import Field, receptive_fields
from stainlock.network.ops import Kind, op_of
from stainlock.network.trace import TracedPart
from stainlock.target import Target

Gates = dict[fx.Node, Tensor]


@dataclass(frozen=True, eq=False)
class Near:
    """The field of a site's layer with gates held constant, and the graph to run with them."""

    part: TracedPart
    node: fx.Node
    pooled: frozenset[fx.Node]
    field: Field

    def open_input(self, target: Target, pixels: Tensor) -> tuple[Tensor, Gates]:
        """The layer's input for whole images, and the values to hold: the maps pooled to one position."""
        with torch.no_grad():
            values = self._run(target.normalise(pixels), {})
        return self._given(values), {node: values[node] for node in self.pooled if node in values}

    def layer_input(self, target: Target, pixels: Tensor, gates: Gates) -> Tensor:
        """The layer's input for crops of images, with gates held at given values."""
        held = {node: value.expand(len(pixels), *value.shape[1:]) for node, value in gates.items()}
        return self._given(self._run(target.normalise(pixels), held))

    def _given(self, values: Mapping[fx.Node, Any]) -> Tensor:
        given = values[self.part.sources(self.node)[0]]
        assert isinstance(given, Tensor)
        return given

    def _run(self, image: Tensor, held: Gates) -> dict[fx.Node, Any]:
        """Run the graph up to the layer, without the nodes that only the held gates need."""
        runner = self._runner
        runner.args_iter = iter((image,))
        runner.env = dict(held)
        for node in self._needed(frozenset(held)):
            runner.env[node] = runner.run_node(node)
        return runner.env

    def _needed(self, held: frozenset[fx.Node]) -> list[fx.Node]:
        if held not in self._orders:
            needed, ahead = set(held), [*self.part.sources(self.node)]
            while ahead:
                node = ahead.pop()
                if node not in needed:
                    needed.add(node)
                    ahead += node.all_input_nodes
            self._orders[held] = [n for n in self.part.graph.nodes if n in needed and n not in held]
        return self._orders[held]

    @cached_property
    def _orders(self) -> dict[frozenset[fx.Node], list[fx.Node]]:
        return {}

    @cached_property
    def _runner(self) -> fx.Interpreter:
        return fx.Interpreter(self.part.traced or self.part.module, garbage_collect_values=False, graph=self.part.graph)


def near_fields(part: TracedPart) -> tuple[frozenset[fx.Node], dict[fx.Node, Field | None]]:
    """The nodes that pool a map to one position, and all fields with these held constant."""
    pooled = frozenset(node for node in part.graph.nodes if _is_pooled(part, node))
    return pooled, receptive_fields(part, pooled) if pooled else {}


def _is_pooled(part: TracedPart, node: fx.Node) -> bool:
    if op_of(part, node).kind is not Kind.SPATIAL:
        return False
    after, before = (part.shapes.get(n, ())[2:] for n in (node, part.sources(node)[0]))
    return math.prod(after) == 1 < math.prod(before)
