"""Operations that change shapes: every size and index is known in advance, or grows with the number of images."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.errors import ModelError
from stainlock.models.onnx_import.building import EXAMPLE, Builder, batched
from stainlock.models.onnx_import.graph import attributes, told
from stainlock.models.onnx_import.network import Size, Value

_FAR = 2**31 - 1  # a slice's end from here on means the end of the axis
_MODES = {"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}


def reshape(builder: Builder, node: Any) -> None:
    given = builder.example(node.input[0])
    sizes = builder.numbers(node, 1, "shape") or []
    if not attributes(node).get("allowzero", 0):
        sizes = [_kept(given, axis) if n == 0 else n for axis, n in enumerate(sizes)]
    sizes = batched(builder, sizes, given)
    builder.step(node.output[0], torch.reshape, builder.value(node.input[0]), sizes)


def _kept(given: Tensor, axis: int) -> int | Size:
    return Size(0, 1) if axis == 0 and given.shape[0] == EXAMPLE else given.shape[axis]


def flatten(builder: Builder, node: Any) -> None:
    axis, given = attributes(node).get("axis", 1), builder.example(node.input[0])
    axis = axis % given.dim() if axis < 0 else axis
    if axis == 1:
        builder.step(node.output[0], torch.flatten, builder.value(node.input[0]), 1)
        return
    rest = math.prod(given.shape[axis:])
    builder.step(node.output[0], torch.reshape, builder.value(node.input[0]), [-1, rest])


def transpose(builder: Builder, node: Any) -> None:
    rank = builder.example(node.input[0]).dim()
    axes = list(attributes(node).get("perm", range(rank)[::-1]))
    builder.step(node.output[0], torch.permute, builder.value(node.input[0]), axes)


def squeeze(builder: Builder, node: Any) -> None:
    given, axes = builder.example(node.input[0]), builder.numbers(node, 1, "axes")
    if axes is None:
        axes = [axis for axis, n in enumerate(given.shape) if n == 1]
    places = sorted({axis % given.dim() for axis in axes})
    if any(given.shape[axis] != 1 for axis in places):
        raise ModelError(f"{told(node)} removes the batch axis: export the model for any number of images")
    builder.step(node.output[0], torch.squeeze, builder.value(node.input[0]), tuple(places))


def unsqueeze(builder: Builder, node: Any) -> None:
    axes, given = builder.numbers(node, 1, "axes") or [], builder.example(node.input[0])
    rank, source = given.dim() + len(axes), builder.value(node.input[0])
    places = sorted(axis % rank for axis in axes)
    for number, axis in enumerate(places, 1):
        output = node.output[0] if number == len(places) else f"{node.output[0]} {number}"
        builder.step(output, torch.unsqueeze, source, axis)
        source = Value(output)


def concat(builder: Builder, node: Any) -> None:
    axis = attributes(node)["axis"]
    parts = [builder.value(name) for name in node.input]
    rows = [builder.example(name).shape[0] for name in node.input]
    if axis % builder.example(node.input[0]).dim() and builder.graph.batch is not None and EXAMPLE in rows:
        for place, name in enumerate(node.input):  # expand a constant of the file's batch size to any
            if rows[place] == builder.graph.batch != EXAMPLE and name not in builder.values:
                output = f"{node.output[0]} part {place}"
                shape = [Size(0, 1), *builder.example(name).shape[1:]]
                builder.step(output, torch.Tensor.expand, parts[place], shape)
                parts[place] = Value(output)
    builder.step(node.output[0], torch.cat, parts, axis)


def split(builder: Builder, node: Any) -> None:
    said, given = attributes(node), builder.example(node.input[0])
    axis = said.get("axis", 0) % given.dim()
    sizes = builder.numbers(node, 1, "split")
    if sizes is None:
        each = -(-given.shape[axis] // len(node.output))
        sizes = [min(each, given.shape[axis] - i * each) for i in range(len(node.output))]
    name = f"{node.output[0]} of all"
    builder.step(name, torch.split, builder.value(node.input[0]), sizes, axis)
    for place, output in enumerate(node.output):
        builder.step(output, operator.getitem, Value(name), place)


def slice_(builder: Builder, node: Any) -> None:
    given = builder.example(node.input[0])
    starts, ends = builder.numbers(node, 1) or [], builder.numbers(node, 2) or []
    axes, steps = builder.numbers(node, 3) or list(range(len(starts))), builder.numbers(node, 4) or [1] * len(starts)
    index: list[slice] = [slice(None)] * given.dim()
    turned = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        place = axis % given.dim()
        if isinstance(step, int) and step < 0:
            if step != -1 or start not in (-1, given.shape[place] - 1) or end > -given.shape[place]:
                raise ModelError(f"{told(node)} reverses part of an axis, expected a whole axis")
            turned.append(place)
            continue
        whole = isinstance(end, int) and end >= min(_FAR, given.shape[place]) and place != 0
        last = None if whole or (isinstance(end, int) and end >= _FAR) else end
        index[place] = slice(None if start == 0 else start, last, None if step == 1 else step)
    source = builder.value(node.input[0])
    if turned:
        builder.step(node.output[0] if index == [slice(None)] * len(index) else f"{node.output[0]} turned",
                     torch.flip, source, turned)  # fmt: skip
        source = Value(f"{node.output[0]} turned")
    if not turned or index != [slice(None)] * len(index):
        builder.step(node.output[0], operator.getitem, source, tuple(index))


def gather(builder: Builder, node: Any) -> None:
    axis, places = attributes(node).get("axis", 0), builder.constant(node, 1)
    source, given = builder.value(node.input[0]), builder.example(node.input[0])
    if places is None:
        builder.step(node.output[0], _taken_from, source, axis % given.dim(), builder.value(node.input[1]))
        return
    places = torch.where(places < 0, places + given.shape[axis], places).long()
    if places.dim() == 0:
        builder.step(node.output[0], torch.select, source, axis, int(places))
    elif places.dim() == 1:
        builder.step(node.output[0], _taken, source, axis, tuple(places.tolist()))
    else:
        raise ModelError(f"{told(node)} gathers by a table of indices, expected a list")


def _taken(x: Tensor, axis: int, places: tuple[int, ...]) -> Tensor:
    return torch.index_select(x, axis, torch.tensor(places, device=x.device))


def _taken_from(x: Tensor, axis: int, places: Tensor) -> Tensor:
    """Gather by indices that depend on the number of images."""
    taken = torch.index_select(x, axis, torch.reshape(places, (-1,)))
    return torch.reshape(taken, (*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))


def range_(builder: Builder, node: Any) -> None:
    ends = [(builder.numbers(node, place) or [0])[0] for place in range(3)]
    builder.step(node.output[0], torch.arange, *ends)


def expand(builder: Builder, node: Any) -> None:
    sizes = builder.numbers(node, 1) or []
    given = builder.example(node.input[0])
    shape = [1] * (len(sizes) - given.dim()) + list(given.shape)
    missing = given.dim() - len(sizes)
    sizes = [-1] * missing + [-1 if n == 1 and shape[i + missing] != 1 else n for i, n in enumerate(sizes)]
    builder.step(node.output[0], torch.Tensor.expand, builder.value(node.input[0]), sizes)


def tile(builder: Builder, node: Any) -> None:
    builder.step(node.output[0], torch.tile, builder.value(node.input[0]), tuple(builder.numbers(node, 1) or []))


def pad(builder: Builder, node: Any) -> None:
    said, given = attributes(node), builder.example(node.input[0])
    pads = builder.numbers(node, 1, "pads") or []
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[
        said.get("mode", "constant")
    ]
    axes = [axis % given.dim() for axis in builder.numbers(node, 3) or range(given.dim())]
    sides = [0] * (2 * given.dim())
    for place, axis in enumerate(axes):
        sides[2 * axis], sides[2 * axis + 1] = pads[place], pads[place + len(axes)]
    ordered = [side for axis in reversed(range(given.dim())) for side in sides[2 * axis : 2 * axis + 2]]
    least = 2 if mode == "constant" else 2 * max(1, given.dim() - 2)
    while len(ordered) > least and not any(ordered[-2:]):  # torch counts from the last axis
        ordered = ordered[:-2]
    constant = builder.constant(node, 2)
    value = said.get("value", 0.0) if constant is None or not constant.numel() else float(constant)
    more = (mode, value) if mode == "constant" else (mode,)
    builder.step(node.output[0], F.pad, builder.value(node.input[0]), ordered, *more)


def resize(builder: Builder, node: Any) -> None:
    said, given = attributes(node), builder.example(node.input[0])
    mode, asked = said.get("mode", "nearest"), said.get("coordinate_transformation_mode", "half_pixel")
    sizes, scales = builder.numbers(node, 3) if builder.has(node, 3) else None, builder.constant(node, 2)
    if sizes is None and scales is not None and scales.numel():
        sizes = [math.floor(n * float(s)) for n, s in zip(given.shape, scales, strict=True)]
    known = asked == "align_corners" or (asked in ("half_pixel", "pytorch_half_pixel") and mode != "nearest")
    known = known or (mode == "nearest" and asked == "asymmetric" and said.get("nearest_mode", "") == "floor")
    if sizes is None or given.dim() != 4 or mode not in _MODES or not known or said.get("antialias", 0):
        raise ModelError(f"{told(node)} resizes in a way ({mode}, {asked}) that torch does not have")
    align = {"align_corners": asked == "align_corners"} if mode != "nearest" else {}
    builder.step(node.output[0], _resized, builder.value(node.input[0]), tuple(sizes[2:]), _MODES[mode],
                 align.get("align_corners"))  # fmt: skip


def _resized(x: Tensor, size: tuple[int, ...], mode: str, align: bool | None) -> Tensor:
    return F.interpolate(x, size, mode=mode, align_corners=align)


def depth_to_space(builder: Builder, node: Any) -> None:
    said = attributes(node)
    if said.get("mode", "DCR") == "CRD":
        builder.step(node.output[0], F.pixel_shuffle, builder.value(node.input[0]), said["blocksize"])
    else:
        builder.step(node.output[0], _shuffled, builder.value(node.input[0]), said["blocksize"])


def _shuffled(x: Tensor, side: int) -> Tensor:
    n, c, h, w = x.shape
    parts = torch.permute(torch.reshape(x, (n, side, side, c // side**2, h, w)), (0, 3, 4, 1, 5, 2))
    return torch.reshape(parts, (n, c // side**2, h * side, w * side))


def cast(builder: Builder, node: Any) -> None:
    kinds = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64,
             16: torch.bfloat16, 2: torch.uint8, 3: torch.int8}  # fmt: skip
    builder.step(node.output[0], torch.Tensor.to, builder.value(node.input[0]), kinds[attributes(node)["to"]])
