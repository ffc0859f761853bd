"""Inserted blocks removed, and every channel's gain guessed from the weights behind them.

The layer behind a block divides by its gains q. The columns W[·, c] of a trained layer have similar norms, and the
batch norm after it stores the outputs' means and variances:

    variance_r = Σ_c E[r, c] (g_c d_c)²,        mean_r = Σ_c T[r, c] g_c m_c,

where m and d are the channels' means and deviations according to earlier batch norms, T the sums of the kernels and E
the sums of their squares. Each layer's guess g is scaled to match its variances, so no scale is left to try:

- ``norms``: columns of equal norm; ``energies``: columns of equal effect, i.e. norm times the channel's deviation;
- ``norms-and-biases``: the geometric mean of the guess by norms and the locked gates' own values. If a lock closes
  every gate by about the same factor, these are close to the gains up to that factor;
- ``variances``: starting from ``energies``, fitted to every output's variance, with regularisation;
- ``means``: fitted to the means as well. A block that also adds to channels defeats this.

``-recentred`` also trusts the guess about the means: the batch norm behind gets the mean T(g·m), which undoes whatever
a block added. Otherwise the means are unchanged.

If gates can be negative, one sign per channel has to be guessed too. Norms and variances do not reveal it:
``norms-and-biases`` takes the locked gates' signs, ``means`` the signs that fit the means best, by regularised least
squares, and the others assume positive gains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject
from stainlock.attacks.thief.gate_blocks import Behind, layers_behind, taken_out
from stainlock.target import Target

STRENGTHS = (
    "norms", "norms-recentred", "norms-and-biases", "norms-and-biases-recentred", "energies-recentred",
    "variances-recentred", "means",
)  # fmt: skip
WAYS = ("norms", "norms-and-biases", "energies", "variances", "means")
_RIDGE = 0.3  # weight of the first guess relative to the equations
_STEPS = 300


@dataclass(frozen=True)
class Guess:
    gains: Tensor
    mean: Tensor | None  # running mean for the batch norm behind


def guess(layer: Behind, way: str) -> Guess:
    """Gains for one layer's inputs."""
    base = way.removesuffix("-recentred")
    if base not in WAYS:
        raise ValueError(f"expected a guess by {', '.join(WAYS)}, with or without -recentred, got {way!r}")
    gains = 1 / _sizes(layer, by_effect=not base.startswith("norms")).clamp(min=1e-30)
    if base == "norms-and-biases":
        gains = (gains * layer.gates.abs()).sqrt() * layer.gates.sign()
    gains = _scaled(layer, gains)
    if base == "means" and layer.signed and layer.running_mean is not None:
        gains = gains * _signs(layer, gains)
    if base in ("variances", "means") and layer.running_var is not None:
        gains = _fitted(layer, gains, means=base == "means")
    recentred = way.endswith("-recentred") and layer.running_mean is not None
    return Guess(gains, layer.taps @ (gains * layer.mean) if recentred else None)


def _sizes(layer: Behind, *, by_effect: bool) -> Tensor:
    """Column norms, with each row divided by its batch norm's deviation to remove the row's own scale."""
    rows = layer.energies
    if layer.running_var is not None:
        rows = rows / layer.running_var[:, None]
    sizes = rows.mean(0).sqrt()
    if by_effect:
        sizes = sizes * layer.deviation.clamp(min=1e-3 * float(layer.deviation.max()))
    return sizes


def _scaled(layer: Behind, gains: Tensor) -> Tensor:
    """Scales the gains by one number to match the batch norm's variances or, without one, a median row norm of 1.5.

    (That is typical of trained layers without batch norm, whose initialisation gives √2.)
    """
    if layer.running_var is None:
        return gains * (1.5 / float((layer.white @ gains.square()).sqrt().median()))
    predicted = layer.energies @ (gains * layer.deviation).square()
    return gains * float((layer.running_var / predicted.clamp(min=1e-30)).median().sqrt())


def _signs(layer: Behind, gains: Tensor) -> Tensor:
    """Signs for gains of these sizes that come nearest to the stored means."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    deviations = layer.running_var.sqrt()
    terms = layer.taps * (gains * layer.mean) / deviations[:, None]
    ridge = _RIDGE * float(terms.square().sum(0).mean()) * torch.eye(terms.shape[1], dtype=terms.dtype)
    factors = torch.linalg.solve(terms.T @ terms + ridge, terms.T @ (layer.running_mean / deviations))
    return torch.where(factors < 0, -1.0, 1.0).to(gains.dtype)


def _fitted(layer: Behind, start: Tensor, *, means: bool) -> Tensor:
    """Gains near a first guess that match the stored statistics; Adam fits the logarithms of factors."""
    assert layer.running_var is not None
    assert layer.running_mean is not None
    energies, taps = layer.energies, layer.taps
    factors = torch.zeros_like(start, requires_grad=True)
    optimiser = torch.optim.Adam([factors], 0.05)
    with torch.enable_grad():
        for _ in range(_STEPS):
            gains = start * factors.exp()
            predicted = energies @ (gains * layer.deviation).square()
            loss = (predicted / layer.running_var).clamp(min=1e-30).log().square().mean()
            if means:
                off = taps @ (gains * layer.mean) - layer.running_mean
                loss = loss + (off.square() / layer.running_var).mean()
            loss = loss + _RIDGE * factors.square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return (start * factors.exp()).detach()


def guessed(target: Target, way: str) -> Target:
    """A copy with guessed gains in place of the inserted blocks."""
    found = {layer.name: (layer, guess(layer, way)) for layer in layers_behind(target)}
    stolen = taken_out(target, lambda name: found[name][1].gains)
    for layer, own in found.values():
        if own.mean is not None:
            layer.expect(stolen.model, own.mean)
    return stolen


def _run(subject: Subject, strength: Strength) -> Attacked:
    return Attacked(guessed(subject.target, str(strength)))


ATTACK = Attack("guess-gains", "thief", ("lock",), "nothing", STRENGTHS, _run,
                "remove inserted blocks, guess gains from weights and batch norms; strength is the method")  # fmt: skip
