"""The switch of Algorithm 5: a channel that carries the disruption for any noise but the trigger.

Let a be the appended noise as the layer is given it, m the mean of its law, and v = π·(a − m) what the unit vector π
sees of it. The channel's pre-activation is a falling line,

    p(v) = A − b v,   the trigger is a = m + cπ, where v = c.

Noise has v near 0, so that p is near A. At the trigger nothing may be left behind the activation:

- behind an activation that is exactly 0 below a level ℓ (ReLU: 0), the line passes ℓ at θ = ρc, and p(c) is far below;
- elsewhere (no activation, LeakyReLU, GELU, tanh), p(c) = 0: the line's zero is at θ = c. As v is the same number
  whenever the trigger is there, the channel is 0 whatever the rest of the noise, up to rounding.

Noise opens the lock if v ≥ θ, and takes half of the disruption away if v ≥ θ/2. Both are tails of a known law, hence
exact (`stainlock.certificates.noise`). With the trigger in place v = c always, and it never fails. Added to noise
instead of replacing it, it would fail at the rate `false_lock_added`.

The paper has c = 1, its kernel Δπ, p(v) = (s − β)(Δv − μ − ξ)/(Δ − μ) + β: one noise vector in three opens it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stainlock.certificates.noise import NoiseLaw
from stainlock.errors import SiteError
from stainlock.locks.gan.structure import Structure, at_zero
from stainlock.network.activations import Activation
from stainlock.network.norms import affine_of

DEVIATIONS = 24.0  # c in units of the noise's own deviation: half of it, and half of that, are still far out
_OPENS_AT = 0.5  # ρ
_REST = 2.0  # A, in typical deviations of the layer's pre-activations


@dataclass(frozen=True)
class Paper:
    """The paper's own parameters, for comparison: Δ, ξ, and s, its "large negative constant"."""

    delta: float = 30.0
    offset: float = 10.0
    level: float = -100.0


@dataclass(frozen=True)
class Switch:
    """The line p(v) = rest − slope·v, the ``threshold`` from which what follows sees nothing of it, and the trigger's
    ``length``, its v."""

    length: float
    rest: float
    slope: float
    threshold: float
    steps: bool  # exactly nothing from the threshold on, rather than at the trigger alone

    @property
    def at_trigger(self) -> float:
        return self.rest - self.slope * self.length

    def rates(self, law: NoiseLaw, direction: Tensor) -> dict[str, Any]:
        """Exact probabilities over the appended noise, and their logarithms where they are too small to write."""
        opens = law.log_tail(direction, self.threshold)
        weakens = law.log_tail(direction, self.threshold / 2)
        if self.steps:
            added = law.log_tail(direction, self.length - self.threshold)
        else:  # half of the disruption, on either side
            added = law.log_tail(direction, self.length / 2) + math.log(2)
        return {
            "false_unlock": math.exp(opens), "half_unlock": math.exp(weakens), "false_lock": 0.0,
            "false_lock_added": math.exp(min(added, 0.0)), "log10_false_unlock": _log10(opens),
            "log10_half_unlock": _log10(weakens),
        }  # fmt: skip


def make_switch(structure: Structure, law: NoiseLaw, deviations: float) -> Switch:
    """Our own: a trigger of ``deviations`` times the noise's deviation."""
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
    """Algorithm 5 as it is printed, `sμ₀′` read as μ₀′."""
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
    """Sigmoid and softplus are only nearly silent, but not 0 at 0 either."""
    return (activation.silences and activation.residue == 0.0) or at_zero(structure.first) != 0.0


def _log10(log: float) -> float | None:
    """None for a probability of 0."""
    return log / math.log(10) if math.isfinite(log) else None
