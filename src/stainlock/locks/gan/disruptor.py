"""The disruptor p′ of Algorithm 5: the reader's weights for the switch's channel, found by gradient descent.

With a discriminator D, p′ minimises the cross-entropy of D calling the locked generator's images fake,
E log(1 + e^{D(G′(z))}); without one it maximises the mean square change of the images. When locked, the channel is
about A everywhere and adds A·(p′ ∗ 1) to the reader's output. The strength of p′ is fixed, in units of each output
channel's standard deviation over noise, and only its direction is learned. With a free strength the search would end in
a slight change that deceives the discriminator, or in numbers too large to cancel exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from stainlock.locks.gan.structure import Structure
from stainlock.network.network import layer_input
from stainlock.network.ops import activation_of_module
from stainlock.target import Target, check_gradient, evaluation_mode

Progress = Callable[[int, int], None]
Judge = Callable[[Tensor], Tensor]  # images to one logit each, positive for real

_START = 0.25  # strength at the first step, as a fraction of the final one
_RATE = 0.1  # learning rate, relative to a weight's typical size


def judge_of(discriminator: Target | Callable[[Tensor], Any], images: Tensor) -> Judge:
    """The discriminator as a function from images to logits ``(N,)``, tried on the generator's images."""
    model = discriminator.model if isinstance(discriminator, Target) else discriminator
    run: Callable[[Tensor], Any] = discriminator.predict if isinstance(discriminator, Target) else discriminator
    leaves = [m for m in model.modules() if not list(m.children())] if isinstance(model, nn.Module) else []
    last = activation_of_module(leaves[-1]) if leaves else None
    probabilities = last is not None and last.inverse is torch.logit

    def judge(given: Tensor) -> Tensor:
        judged = run(given)
        if not isinstance(judged, Tensor) or judged.shape[:1] != given.shape[:1] or judged.numel() != len(given):
            came = tuple(judged.shape) if isinstance(judged, Tensor) else type(judged).__name__
            raise ValueError(
                f"expected a discriminator with one output per image, ({len(given)},) or ({len(given)}, 1), got {came}"
            )
        flat = judged.flatten()
        return torch.logit(flat, eps=1e-6) if probabilities else flat

    def in_evaluation_mode(given: Tensor) -> Tensor:
        if not isinstance(model, nn.Module):
            return judge(given)
        with evaluation_mode(model):
            return judge(given)

    try:
        with torch.no_grad():
            in_evaluation_mode(images[:2])
    except ValueError:
        raise
    except Exception as error:  # a model runs arbitrary code, which fails in arbitrary ways on the wrong input
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(
            f"the discriminator does not accept the generator's images of {tuple(images.shape[1:])} ({why})"
        ) from error
    return in_evaluation_mode


def find_disruptor(
    edited: Target,
    structure: Structure,
    channel: int,
    noise: Tensor,
    originals: Tensor,
    *,
    judge: Judge | None,
    strength: float,
    steps: int,
    batch: int,
    generator: torch.Generator,
    progress: Progress | None,
) -> Tensor:
    """p′, as a column of the reader's weight; ``noise`` is for the widened generator, ``originals`` its true images."""
    reader = structure.reader
    name = f"{reader.name}.weight"
    weight = reader.layer(edited.model).get_parameter("weight").detach()
    place: Any = tuple(slice(None) if axis is None else axis for axis in structure.column(channel))
    with evaluation_mode(edited.model):
        unit = _unit(edited, structure, channel, noise, weight)
        direction = torch.randn(unit.shape, generator=generator, dtype=torch.float64).to(weight)
        radii = [math.sqrt(direction.numel()) * strength * part for part in _growth(steps)]
        direction = (direction * (radii[0] / direction.norm())).requires_grad_()
        optimiser = torch.optim.Adam([direction], lr=_RATE * strength)
        inputs = edited.normalise(noise)
        best, least = direction.detach().clone(), math.inf
        for step in range(steps):
            chosen = torch.randint(len(inputs), (min(batch, len(inputs)),), generator=generator).to(inputs.device)
            changed = weight.clone()
            changed[place] = direction * unit
            images = functional_call(edited.model, {name: changed}, (inputs[chosen], *edited.extra_inputs))
            if judge is not None:
                loss = F.softplus(judge(images)).mean()
            else:
                loss = -(images - originals[chosen]).square().mean()
            optimiser.zero_grad()
            check_gradient(loss)
            (direction.grad,) = torch.autograd.grad(loss, direction)
            if radii[step] == radii[-1] and float(loss.detach()) < least:
                best, least = direction.detach().clone(), float(loss.detach())
            optimiser.step()
            with torch.no_grad():
                direction *= radii[min(step + 1, steps - 1)] / direction.norm()
            if progress is not None:
                progress(step + 1, steps)
    found: Tensor = (best * unit).detach().cpu()
    return found


def _growth(steps: int) -> list[float]:
    """The strength at each step. A random start at full strength would saturate the output, where gradients vanish."""
    return [min(1.0, _START + (1 - _START) * step / max(1, steps // 2)) for step in range(steps)]


def _unit(edited: Target, structure: Structure, channel: int, noise: Tensor, weight: Tensor) -> Tensor:
    """For each weight of p′, the size at which p′ adds about one deviation to its output channel when locked."""
    layer = structure.reader.layer(edited.model)
    with torch.no_grad():
        maps = layer_input(edited, structure.reader, noise)
        level = maps[:, channel].abs().mean().clamp(min=1e-6)
        maps[:, channel] = 0
        deviation = layer(maps).double().std((0, 2, 3)).clamp(min=1e-9)
    kernel = weight.shape[2] * weight.shape[3]
    # About this many of a kernel's weights contribute to one output position; they add up like random numbers.
    stride = layer.stride if isinstance(layer, nn.ConvTranspose2d) else (1, 1)
    meeting = max(1.0, kernel / (int(stride[0]) * int(stride[1])))
    size = (deviation / float(level) / math.sqrt(meeting)).to(weight)
    spread: Tensor = size.view(-1, 1, 1).expand(-1, *weight.shape[2:]).clone()
    return spread
