"""What a thief sees of a keyed lock: the file without its gates, which layers are gated, and those layers' inputs.

Everything is found from the model's structure; no key is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock.attacks.attack import NotApplicable
from stainlock.attacks.pixels import Pictures
from stainlock.gating.gated import Gated
from stainlock.locks.keyed import Structure, file_view
from stainlock.target import Target, evaluation_mode

IMAGES = 512  # number of the thief's images used for channel statistics
_BATCH = 64
_SAMPLES = 8000  # positions sampled for statistics, over all images
_WIDEST = 1200  # limit on channels × taps; wider layers are treated as if kernels had one tap


class _Reached(Exception):
    """Raised when the wanted layer is called: the rest of the model need not run."""


def keyed_file(target: Target) -> tuple[Target, Structure]:
    """A copy without reader and gates, and their structure according to the bundle."""
    structure = Structure.of(target)
    if structure is None:
        raise NotApplicable("no keyed lock in this model")
    return file_view(target), structure


def ordered(structure: Structure) -> tuple[Gated, ...]:
    """The gates that permute columns, in the order in which they run."""
    return tuple(gated for gated in structure.gates if gated.form == "order")


def scattered(structure: Structure) -> tuple[Gated, ...]:
    """The layers whose weights are scattered."""
    return tuple(gated for gated in structure.gates if gated.form == "scatter")


def without_gates(target: Target) -> Target:
    """The thief's starting point: the file without a keyed lock's gates, or the model itself if it has none."""
    return target if Structure.of(target) is None else file_view(target)


def weight_of(target: Target, gated: Gated) -> Tensor:
    """The parameter whose columns the gate permutes."""
    return target.model.get_parameter(gated.tensor).data


def columns(target: Target, gated: Gated) -> Tensor:
    """``(C, outputs, taps)`` in float64: the weights of each input channel."""
    moved = weight_of(target, gated).double().movedim(gated.axis, 0)
    return moved.reshape(len(moved), moved.shape[1], -1)


def reorder(target: Target, gated: Gated, order: Tensor) -> None:
    """Moves column i of the file to ``order[i]``, which is π(i) if the thief is right. Changes the model in place."""
    weight = weight_of(target, gated)
    weight.copy_(weight.index_select(gated.axis, order.argsort().to(weight.device)))


def given_to(target: Target, gated: Gated, pixels: Pictures, generator: torch.Generator) -> Tensor:
    """A gated layer's inputs at random positions: ``(C, taps, samples)`` in float64."""
    layer = target.model.get_submodule(gated.layer)
    width = weight_of(target, gated).shape[gated.axis]
    found: list[Tensor] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(_sampled(layer, gated, width, args[0] if args else next(iter(kwargs.values())), generator))
        raise _Reached

    hook = layer.register_forward_pre_hook(look, with_kwargs=True)
    share = _SAMPLES * _BATCH // max(len(pixels), _BATCH)
    try:
        with evaluation_mode(target.model), torch.no_grad():
            for batch in pixels.split(_BATCH):
                try:
                    target.predict(batch)
                except _Reached:
                    found[-1] = found[-1][..., :share]
    finally:
        hook.remove()
    return torch.cat(found, -1).double()


def _sampled(layer: nn.Module, gated: Gated, width: int, x: Tensor, generator: torch.Generator) -> Tensor:
    x = x.detach().cpu()
    taps = 1
    if isinstance(layer, nn.Conv2d) and isinstance(layer.padding, tuple):
        taps = layer.kernel_size[0] * layer.kernel_size[1]
        if width * taps <= _WIDEST:
            x = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        else:
            x, taps = x.flatten(2), 1
        flat = x.transpose(0, 1).flatten(1)
    else:
        flat = x.movedim(gated.channels, 0).flatten(1)
    chosen = torch.randint(flat.shape[1], (min(_SAMPLES, flat.shape[1]),), generator=generator)
    return flat[:, chosen].view(width, taps, -1)


def norms_behind(target: Target, gates: tuple[Gated, ...], pixels: Pictures) -> dict[str, nn.Module]:
    """The batch norm directly behind each gated layer, by the layer's name."""
    gated = {gate.layer for gate in gates}
    outputs: dict[int, str] = {}
    kept: list[Tensor] = []  # keeps ids unique
    found: dict[str, nn.Module] = {}

    def gave(name: str, output: Any) -> None:
        if isinstance(output, Tensor):
            kept.append(output)
            outputs[id(output)] = name

    hooks = []
    for name, module in target.model.named_modules():
        if name in gated:
            hooks.append(module.register_forward_hook(lambda _, args, output, name=name: gave(name, output)))
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            hooks.append(
                module.register_forward_pre_hook(
                    lambda norm, args: found.update({outputs[id(args[0])]: norm}) if id(args[0]) in outputs else None
                )
            )
    try:
        with evaluation_mode(target.model), torch.no_grad():
            target.predict(pixels[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return found
