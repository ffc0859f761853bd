"""Receptive fields: which pixels one position of a layer sees.

Fields are computed node by node through the traced graph, from the windows in `stainlock.network.ops`. An operation
without a window, or one that mixes all positions (attention, a pooled gate, a dense layer on a flattened map), is
assumed to see the whole input, which is always a valid bound.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from stainlock.network.ops import POINT, Kind, Window, canonical, channels_are_last, op_of
from stainlock.network.trace import TracedPart


@dataclass(frozen=True)
class Axis:
    """Along one axis, position i sees pixels ``start + jump·i … start + jump·i + size − 1``."""

    size: int = 1
    jump: int = 1
    start: int = 0

    def through(self, kernel: int, stride: int, padding: int, dilation: int = 1) -> Axis:
        return Axis(
            self.size + (kernel - 1) * dilation * self.jump,
            self.jump * stride,
            self.start - padding * self.jump,
        )

    def interval(self, position: int, pixels: int) -> tuple[int, int]:
        """First pixel and one past the last that the position sees, clipped to the input."""
        first = self.start + self.jump * position
        return max(first, 0), min(first + self.size, pixels)


Field = tuple[Axis, ...]  # vertical and horizontal, preceded by time for video

# Kinds that act on each position by itself, whichever axis channels are on. Windows of other operations assume channels
# on the second axis.
_ANYWHERE = {Kind.DENSE, Kind.MIXING, Kind.PERMUTE, Kind.ACTIVATION, Kind.NOTHING, Kind.SUM, Kind.PRODUCT}
_ELEMENTWISE = ("add", "sub", "mul", "truediv", "neg")


def receptive_fields(part: TracedPart, constant: Collection[fx.Node] = ()) -> dict[fx.Node, Field | None]:
    """The field of every node whose output depends on the image; None means the whole input. ``constant`` nodes are
    taken not to depend on it."""
    image = next(iter(part.graph.nodes))
    fields: dict[fx.Node, Field | None] = {image: (Axis(),) * (part.rank - 2)}
    for node in part.graph.nodes:
        sources = [n for n in part.sources(node) if n in fields]
        if node is image or node.op in ("placeholder", "get_attr") or node in part.sizes or not sources:
            continue
        if node in constant:
            continue
        fields[node] = _field(part, node, sources, [fields[n] for n in sources])
    return fields


def _field(part: TracedPart, node: fx.Node, sources: list[fx.Node], seen: list[Field | None]) -> Field | None:
    known = [field for field in seen if field is not None]
    op = op_of(part, node)
    window = op.window()
    if len(known) < len(seen) or window is None or len(part.shapes.get(node, ())) != part.rank:
        return None
    maps = [n for n in sources if len(part.shapes.get(n, ())) == part.rank]
    last = {channels_are_last(part, n) for n in maps}
    anywhere = op.kind in _ANYWHERE or canonical(part.operation(node)) in _ELEMENTWISE
    if last == {True, False} or (last == {True} and (window != POINT or not anywhere)):
        return None
    if op.kind is Kind.PERMUTE and channels_are_last(part, node) in last:  # does not switch between the two layouts
        return None
    if window != POINT or len(known) == 1:
        # A factor of one position, such as a pooled gate, is broadcast: the positions are not those of the source.
        same = window != POINT or _size(part, node) == _size(part, sources[0])
        return _through(known[0], window) if same and len(known) == 1 else None
    return _union(known) if len({_size(part, n) for n in (node, *maps)}) == 1 else None


def _size(part: TracedPart, node: fx.Node) -> tuple[int, ...]:
    """The shape of a map's positions."""
    shape = part.shapes.get(node, ())
    return shape[1:-1] if channels_are_last(part, node) else shape[2:]


def _through(source: Field, window: Window) -> Field:
    if window == POINT:
        return source
    return tuple(
        axis.through(*numbers)
        for axis, *numbers in zip(source, window.kernel, window.stride, window.padding, window.dilation, strict=True)
    )


def _union(sources: list[Field]) -> Field | None:
    merged = []
    for axes in zip(*sources, strict=True):
        if len({axis.jump for axis in axes}) > 1:
            return None
        start = min(axis.start for axis in axes)
        merged.append(Axis(max(axis.start + axis.size for axis in axes) - start, axes[0].jump, start))
    return tuple(merged)
