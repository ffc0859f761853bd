"""Chooses the layers whose weights are scattered: every path from the image to an output goes through one of them.

Channels that are merely permuted can be identified by their covariance on any images, if everything before them is
known: a trained layer's columns follow the covariance of its inputs. So the first layers must stay unknown. Of a
scattered layer only the values of each row are known, not which weight is which. Images reveal no more about them than
about the weights of any other network, and so the inputs of later layers stay unknown too.

A forward pass of one image records what was computed from what (autograd's graph). The first layer on a path from the
image to an output is scattered, then the first layer on a path around it, until no layer is on a remaining path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stainlock.target import Target, evaluation_mode, tensors_in

# Largest number of scattered layers. In networks that would need more, every layer is on a path around the others.
_MOST = 8


def cut(target: Target, layers: Sequence[str]) -> list[str]:
    """The first of these layers on the paths from an image; ``layers`` are in the order in which they run."""
    made: dict[str, Any] = {}
    hooks = [
        target.model.get_submodule(name).register_forward_hook(
            lambda _, args, output, name=name: made.update({name: getattr(output, "grad_fn", None)})
        )
        for name in layers
    ]
    pixels = torch.full((1, *target.input_shape), sum(target.bounds) / 2, requires_grad=True)
    try:
        with evaluation_mode(target.model), torch.inference_mode(False), torch.enable_grad():
            answers = [t.grad_fn for t in tensors_in(target.predict(pixels.clone())) if t.grad_fn is not None]
    finally:
        for hook in hooks:
            hook.remove()
    chosen: list[str] = []
    while len(chosen) < _MOST:
        left = _on_ways(answers, pixels, [made[name] for name in chosen])
        following = next((name for name in layers if name not in chosen and made.get(name) in left), None)
        if following is None:
            break
        chosen.append(following)
    return chosen or list(layers[:1])


def _on_ways(answers: Iterable[Any], image: Tensor, walls: Sequence[Any]) -> set[Any]:
    """The nodes of autograd's graph on paths from the image to the answers that avoid the ``walls``."""
    before: dict[Any, list[Any]] = {}  # which nodes each was reached from, going back from the answers
    waiting = [node for node in answers if node not in walls]
    seen = set(waiting)
    starts = []
    while waiting:
        node = waiting.pop()
        if getattr(node, "variable", None) is image:
            starts.append(node)
        for earlier, _ in node.next_functions:
            if earlier is None or earlier in walls:
                continue
            before.setdefault(earlier, []).append(node)
            if earlier not in seen:
                seen.add(earlier)
                waiting.append(earlier)
    found, waiting = set(starts), list(starts)
    while waiting:
        for later in before.get(waiting.pop(), ()):
            if later not in found:
                found.add(later)
                waiting.append(later)
    return found
