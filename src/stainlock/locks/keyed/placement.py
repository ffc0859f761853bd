"""Chooses the layers that get gates.

A layer can have a gate if its own weight reads its input channel by channel and a forward pass calls it exactly once. A
layer that is called twice, or whose weight is used without calling it, would not see the same permutation everywhere.
Calls are counted by running the model on one image and on two. The axis of a layer's input that doubles is the batch
axis.

The first layers that an image reaches are scattered (see `cut`). By default all other layers get a gate, except those
for which large maps would be copied while little is computed with each value: these are few, and would cost more time
than all others together. CIFAR ResNets have no such layers. Layers left as they were trained help a thief who
fine-tunes: with 1000 labels and 125 steps, ResNet20 came 1 point above random weights with all gates, 2 to 4 with gates
before one of every two layers, 6 with one of every three. ``spread`` takes one of every two layers in the order in
which they run, the one with fewer values to permute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from stainlock.errors import ModelError, meant
from stainlock.gating.gated import Gated, gated_layer, scattered_layer
from stainlock.locks.keyed.cut import cut
from stainlock.network.object_detectors import is_object_detector
from stainlock.target import Target, evaluation_mode

Shapes = dict[str, list[tuple[int, ...]]]

# Layers with fewer input channels than this have too few permutations to be worth a gate: 16! is 2⁴⁴.
_NARROWEST = 16
# ``spread``: one of this many consecutive layers gets a gate.
SPREAD = 2
# On maps with more values than this, a gate is worth its time if each value is used in this many multiplications.
_LARGE_MAP, _WORTH = 2**16, 192
# Weights in a row: shorter ones have too few permutations. Weights in a layer: for more, drawing them takes too long.
_SHORTEST_ROW, _MOST_SCATTERED = 9, 2**22


@dataclass(frozen=True)
class Candidate:
    """A layer that can have a gate, the number of values per image that the gate permutes, and the number of
    multiplications with each of them."""

    gated: Gated
    values: int
    work: float

    @property
    def positions(self) -> int:
        return self.values // self.gated.width


def place_gates(
    target: Target, gates: str | int | Sequence[str] = "usual", scatter: str | Sequence[str] = "first"
) -> list[Gated]:
    """The layers to gate: ``usual``, ``all``, ``spread``, a number of them spread evenly, or those named; then the
    layers to scatter: those that come ``first``, ``all`` that can be, ``none``, or those named."""
    found = candidates(target)
    scattered = _to_scatter(target, found, scatter)
    taken = {gated.layer for gated in scattered}
    if not isinstance(gates, str | int):
        return [*(gated for gated in _named(target, found, list(gates)) if gated.layer not in taken), *scattered]
    usable = [c for c in _on_the_way([c for c in found if c.gated.width >= _NARROWEST]) if c.gated.layer not in taken]
    if not usable and not scattered:
        raise ModelError(
            f"the model has no layer to gate: expected a Linear or ungrouped convolution of at least {_NARROWEST} input"
            " channels that every forward pass calls once"
        )
    return [*_some(usable, gates), *scattered]


def _some(usable: list[Candidate], gates: str | int) -> list[Gated]:
    if gates == "usual":
        return [c.gated for c in usable if c.values <= _LARGE_MAP or c.work >= _WORTH] or [c.gated for c in usable]
    if gates == "all" or not usable:
        return [c.gated for c in usable]
    if gates == "spread":
        count = math.ceil(len(usable) / SPREAD)
    elif isinstance(gates, int) and not isinstance(gates, bool) and 1 <= gates <= len(usable):
        count = gates
    else:
        raise ValueError(
            f"expected gates usual, all, spread, names of layers, or a number up to {len(usable)}, got {gates!r}"
        )
    edges = [round(i * len(usable) / count) for i in range(count + 1)]
    runs = [usable[a:b] for a, b in pairwise(edges)]
    return [min(run, key=lambda c: c.values).gated for run in runs]


def _to_scatter(target: Target, found: list[Candidate], scatter: str | Sequence[str]) -> list[Gated]:
    possible = {}
    for candidate in found:
        gated = scattered_layer(candidate.gated, target.model.get_submodule(candidate.gated.layer))
        if gated is not None and gated.width >= _SHORTEST_ROW and gated.rows * gated.width <= _MOST_SCATTERED:
            possible[candidate.gated.layer] = gated
    if scatter == "none" or (scatter in ("first", "all") and not possible):
        return []
    if scatter == "all":
        return list(possible.values())
    if scatter == "first":
        return [possible[name] for name in cut(target, list(possible))]
    if isinstance(scatter, str) or not scatter or len(set(scatter)) != len(scatter):
        raise ValueError(f"expected scatter first, all, none or different names of layers, got {scatter!r}")
    for name in scatter:
        if name not in possible:
            raise ValueError(
                f"{name} can't be scattered: expected a Linear or an ungrouped Conv2d that is called once for each"
                f" image, with rows of {_SHORTEST_ROW} weights or more and at most {_MOST_SCATTERED} in all"
            )
    return [possible[name] for name in scatter]


def candidates(target: Target) -> list[Candidate]:
    """Every layer that can have a gate, in the order in which they run."""
    possible = _possible(target)
    single, double = (_shapes(target, list(possible), batch) for batch in (1, 2))
    strict = is_object_detector(target.model)  # its later layers get the boxes of all images together
    found = []
    for name, once in single.items():
        twice = double.get(name, [])
        if len(once) == 1 == len(twice):
            work = _work(possible[name], target.model)
            candidate = _with_batch_axis(possible[name], work, once[0], twice[0], strict=strict)
            if candidate is not None:
                found.append(candidate)
    return found


def _possible(target: Target) -> dict[str, Gated]:
    """Layers that share their weight with no other, by name."""
    names: dict[int, int] = {}
    for _, parameter in target.model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    own = {name for name, p in target.model.named_parameters(remove_duplicate=False) if names[id(p)] == 1}
    layers = ((name, gated_layer(name, module)) for name, module in target.model.named_modules())
    return {name: gated for name, gated in layers if gated is not None and gated.tensor in own}


def _shapes(target: Target, names: Sequence[str], batch: int) -> Shapes:
    """The shapes of the inputs of each layer, in the order of the calls."""
    pixels = torch.full((batch, *target.input_shape), sum(target.bounds) / 2)
    shapes: Shapes = {}

    def record(name: str, x: Tensor) -> None:
        shapes.setdefault(name, []).append(tuple(int(n) for n in x.shape))

    hooks = [
        target.model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: record(name, args[0] if args else next(iter(kwargs.values()))),
            with_kwargs=True,
        )
        for name in names
    ]
    try:
        with evaluation_mode(target.model), torch.no_grad():
            target.predict(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _work(gated: Gated, model: nn.Module) -> float:
    """Multiplications with each value of the layer's input."""
    strides = getattr(model.get_submodule(gated.layer), "stride", 1)
    weights = model.get_parameter(gated.tensor).numel() / gated.width
    return weights / (1 if gated.axis == 0 else math.prod(strides if isinstance(strides, tuple) else (strides,)))


def _with_batch_axis(
    gated: Gated, work: float, once: tuple[int, ...], twice: tuple[int, ...], *, strict: bool
) -> Candidate | None:
    """The candidate with its batch axis; None if its input has no axis that separates the images."""
    if len(once) != len(twice):
        return None
    axes = [axis for axis, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
    channels = gated.channels % len(once)
    if len(axes) != 1 or twice[axes[0]] != 2 * once[axes[0]] or once[channels] != gated.width:
        return None
    (axis,) = axes
    repeat = once[axis]
    movable = axis == 0 if gated.channels == 1 else axis != channels
    if not movable or (repeat != 1 and (strict or axis != 0)):
        return None
    return Candidate(replace(gated, batch=axis, repeat=repeat), math.prod(once), work)


def _on_the_way(found: list[Candidate]) -> list[Candidate]:
    """Without layers on pooled channels that are followed by layers on maps, as in squeeze-and-excite blocks: they are
    small, and a thief can do without them."""
    last = max((i for i, c in enumerate(found) if c.positions > 1), default=-1)
    return [c for i, c in enumerate(found) if c.positions > 1 or i > last]


def _named(target: Target, found: list[Candidate], names: list[str]) -> list[Gated]:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"expected one or more different layers to gate, got {names}")
    known = {c.gated.layer: c.gated for c in found}
    modules = dict(target.model.named_modules())
    for name in names:
        if name in known:
            continue
        if name not in modules:
            advice = meant(name, known) or "see stainlock inspect"
            raise ValueError(f"expected layers of the model to gate, got {name!r}, which is no layer of it; {advice}")
        raise ValueError(f"{name} can't have a gate: {_reason(modules[name])}")
    order = list(known)
    return [known[name] for name in sorted(names, key=order.index)]


def _reason(module: nn.Module) -> str:
    if getattr(module, "groups", 1) != 1:
        return "it is a grouped convolution, whose kernels do not read every channel"
    if gated_layer("", module) is None:
        return f"it is a {type(module).__name__}, expected a Linear or an ungrouped convolution"
    return "the model does not call it exactly once for each image, or shares its weight"
