"""Gains and shifts of inserted blocks, fitted so that the thief's images reproduce the batch norms' statistics.

Every batch norm behind a lock still stores the means and variances of the unlocked model. Images without labels suffice
to fit them: Adam trains one gain and one shift per channel, starting from the guess by norms, on

    Σ over batch norms of the mean of (Δmean)²/variance + (log of the variances' ratio)².

If gates can be negative, gains start near zero with random signs, and their signs may change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Progress, Strength, Subject, number
from stainlock.attacks.pixels import Pictures
from stainlock.attacks.thief.gate_blocks import layers_behind
from stainlock.attacks.thief.guess_gains import guess
from stainlock.insertion import Gated
from stainlock.target import Target, evaluation_mode

BATCH, RATE = 32, 0.03
_NEAR_ZERO = 0.3  # deviation of the first gains of signed gates, relative to the guess


class Scaling(nn.Module):
    """A gain and a shift per channel, in place of a block. Gains are multiplied by ``factors`` if signed, otherwise by
    exp(``factors``); shifts are in units of ``sizes``."""

    def __init__(self, gains: Tensor, factors: Tensor, sizes: Tensor, *, signed: bool) -> None:
        super().__init__()
        self.factors, self.shifts = nn.Parameter(factors.float()), nn.Parameter(torch.zeros(len(gains)))
        self.register_buffer("gains", gains.float())
        self.register_buffer("sizes", sizes.float())
        self.signed = signed

    def forward(self, x: Tensor) -> Tensor:
        gains: Any = self.gains
        sizes: Any = self.sizes
        gains = gains * (self.factors if self.signed else self.factors.exp())
        scaled: Tensor = x * gains[:, None, None] + (self.shifts * sizes)[:, None, None]
        return scaled


def matched(
    target: Target, images: Pictures, steps: int, generator: torch.Generator, progress: Progress | None
) -> Target:
    """A copy with fitted gains and shifts in place of the inserted blocks."""
    guesses = {layer.name: (layer, guess(layer, "norms").gains) for layer in layers_behind(target)}
    fitted = target.copy()
    for parameter in fitted.model.parameters():
        parameter.requires_grad_(False)
    shifted = {}
    for name, (layer, gains) in guesses.items():
        gated: Any = fitted.model.get_submodule(name)
        assert isinstance(gated, Gated)
        spread = gains * (layer.mean.square() + layer.deviation.square()).sqrt()
        start = torch.zeros(len(gains))
        if layer.signed:
            start = _NEAR_ZERO * torch.randn(len(gains), generator=generator)
        shifted[name] = Scaling(gains, start, spread, signed=layer.signed)
        shifted[name].shifts.requires_grad_(hasattr(gated.gate, "fc3"))  # only blocks with an fc3 add shifts
        gated.gate = shifted[name]
    unknown = [p for block in shifted.values() for p in (block.factors, block.shifts) if p.requires_grad]
    optimiser = torch.optim.Adam(unknown, RATE)
    losses: list[Tensor] = []
    norms = [m for m in fitted.model.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        raise NotApplicable("no batch norm in this model")
    handles = [norm.register_forward_pre_hook(lambda m, given: losses.append(_apart(m, given[0]))) for norm in norms]
    with evaluation_mode(fitted.model), torch.enable_grad():
        for step in range(steps):
            losses.clear()
            fitted.run_traced(images[torch.randperm(len(images), generator=generator)[:BATCH]])
            loss = torch.stack([own for own in losses if own.requires_grad]).sum()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(unknown, 1.0)
            optimiser.step()
            if progress is not None:
                progress(step + 1, steps)
    for handle in handles:
        handle.remove()
    return replace(fitted, insertions=())


def _apart(norm: nn.Module, given: Tensor) -> Tensor:
    running: Any = norm
    variance, mean = torch.var_mean(given, dim=(0, *range(2, given.dim())), correction=0)
    expected = running.running_var + running.eps
    off = (mean - running.running_mean).square() / expected + (variance + running.eps).div(expected).log().square()
    apart: Tensor = off.clamp(max=100).mean()
    return apart


def _run(subject: Subject, strength: Strength) -> Attacked:
    images, generator = subject.need_images(), subject.randomness.noise("matching statistics")
    return Attacked(matched(subject.target, images, int(number(strength)), generator, subject.progress))


ATTACK = Attack("match-statistics", "thief", ("lock",), "images", (60,), _run,
                "fit gains and shifts to the batch norms' statistics; strength is the number of steps")  # fmt: skip
