"""The switch of Algorithm 5: a channel that carries the disruption for any noise except the trigger.

Let a be the appended noise as the layer sees it, m the mean of its distribution, and v = π·(a − m) its component along
the unit vector π. The channel's pre-activation is a falling line,

    p(v) = A − b v,   the trigger is a = m + cπ, where v = c.

Noise has v near 0, so p is near A. At the trigger the channel must be 0 after the activation:

- with an activation that is exactly 0 below a level ℓ (ReLU: 0), the line crosses ℓ at θ = ρc, and p(c) is far below;
- otherwise (no activation, LeakyReLU, GELU, tanh), p(c) = 0: the line's zero is at θ = c. Since v is the same number
  whenever the trigger is there, the channel is 0 up to rounding, whatever the rest of the noise.

Noise opens the lock if v ≥ θ, and removes half of the disruption if v ≥ θ/2. Both probabilities are tails of a known
distribution, hence exact (`stainlock.certificates.noise`). With the trigger in place v is always c, and unlocking never
fails. If the trigger were added to noise instead of replacing it, it would fail at the rate `false_lock_added`.

The paper has c = 1, the kernel Δπ, and p(v) = (s − β)(Δv − μ − ξ)/(Δ − μ) + β: one noise vector in three opens it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stainlock.certificates.noise import NoiseLaw
from stainlock.errors import SiteError
from stainlock.locks.gan.structure import Structure, at_zero
from stainlock.network.norms import affine_of
from stainlock.network.ops import Activation

DEVIATIONS = 24.0  # c, in standard deviations of the noise: θ = c/2 and θ/2 are still far out
_OPENS_AT = 0.5  # ρ
_REST = 2.0  # A, in median standard deviations of the layer's pre-activations


@dataclass(frozen=True)
class Paper:
    """The paper's own parameters, for comparison: Δ, ξ, and s, its "large negative constant"."""

    delta: float = 30.0
    offset: float = 10.0
    level: float = -100.0


@dataclass(frozen=True)
class Switch:
    """The line p(v) = rest − slope·v, the ``threshold`` θ from which on the next layer sees nothing of it, and the
    trigger's ``length`` c, which is its v."""

    length: float
    rest: float
    slope: float
    threshold: float
    steps: bool  # exactly 0 from the threshold on, rather than only at the trigger

    @property
    def at_trigger(self) -> float:
        return self.rest - self.slope * self.length

    def rates(self, law: NoiseLaw, direction: Tensor) -> dict[str, Any]:
        """Exact probabilities over the appended noise, and the logarithms of those that may be too small to write."""
        opens = law.log_tail(direction, self.threshold)
        weakens = law.log_tail(direction, self.threshold / 2)
        if self.steps:
            added = law.log_tail(direction, self.length - self.threshold)
        else:  # half of the disruption is back, on either side
            added = law.log_tail(direction, self.length / 2) + math.log(2)
        return {
            "false_unlock": math.exp(opens), "half_unlock": math.exp(weakens), "false_lock": 0.0,
            "false_lock_added": math.exp(min(added, 0.0)), "log10_false_unlock": _log10(opens),
            "log10_half_unlock": _log10(weakens),
        }  # fmt: skip


def make_switch(structure: Structure, law: NoiseLaw, deviations: float) -> Switch:
    """Our own switch: a trigger of ``deviations`` standard deviations of the noise."""
    activation = structure.first.activation
    norm = structure.network.target.model.get_submodule(structure.first.norm or "")
    rest = _REST * float(affine_of(norm).deviation.median()) or 1.0
    length = deviations * law.deviation
    if activation is not None and _exactly_silent(structure, activation):
        rest = min(rest, activation.ceiling / 2)
        slope = (rest - activation.silent_below) / (_OPENS_AT * length)
        return Switch(length, rest, slope, _OPENS_AT * length, True)
    return Switch(length, rest, rest / length, length, False)


def paper_switch(structure: Structure, channel: int, paper: Paper) -> Switch:
    """Algorithm 5 as printed, with `sμ₀′` read as μ₀′."""
    activation = structure.first.activation
    if activation is None or not activation.silences or activation.silent_below < 0:
        found = "none" if activation is None else activation.name
        raise SiteError(f"the paper's parameters need a ReLU after {structure.first.name}, found {found}")
    norm = structure.network.target.model.get_submodule(structure.first.norm or "")
    affine = affine_of(norm)
    beta = float(affine.mean[channel])
    mu = (beta - float(affine.h[channel])) / float(affine.g[channel])
    slope = -(paper.level - beta) * paper.delta / (paper.delta - mu)
    rest = beta - (paper.level - beta) * (mu + paper.offset) / (paper.delta - mu)
    return Switch(1.0, rest, slope, rest / slope, True)


def _exactly_silent(structure: Structure, activation: Activation) -> bool:
    """Whether to use the first form. Sigmoid and softplus are only nearly silent, but the second needs 0 at 0."""
    return (activation.silences and activation.residue == 0.0) or at_zero(structure.first) != 0.0


def _log10(log: float) -> float | None:
    """None for a probability of 0."""
    return log / math.log(10) if math.isfinite(log) else None
