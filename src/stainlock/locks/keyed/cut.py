"""The layers whose weights are scattered: whatever an image takes into the network goes through one of them.

Channels that are merely in another order can be told by their covariance on any images, if everything before them is
known: a trained layer's columns follow the covariance of what they are multiplied with. So what comes first must not be
found out. Of a scattered layer only the values of each row are known, not which weight is which: nothing in the images
says more about them than about the weights of any other network, and what comes behind it is not known either.

A forward pass of one image records what was computed from what (autograd's graph). The first layer that is on a way
from the image to an answer is scattered, then the first that is on a way around it, until there is no way left that a
layer is on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stainlock.target import Target, evaluation_mode
from stainlock.tensors import tensors_in

# Ways around the first layers that are followed up; where there are more, every layer is on one of them.
_MOST = 8


def cut(target: Target, layers: Sequence[str]) -> list[str]:
    """The first of these layers, given in the order in which they run, that an image's ways lead through."""
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
    """The nodes of autograd's graph on ways from the image to the answers that go through no wall."""
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
