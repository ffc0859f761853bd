"""New blocks taken out, and every channel's gain guessed from the weights behind them.

The layer behind a block divides by its gains q. In a trained layer columns W[·, c] are much alike in size, and the
batch norm after it remembers the outputs' means and variances:

    variance_r = Σ_c E[r, c] (g_c d_c)²,        mean_r = Σ_c T[r, c] g_c m_c,

m and d being what earlier batch norms tell of the channels, T the sums of kernels, E the sums of their squares. Each
layer's guess g is scaled to give its variances, so that nothing is left to be tried out:

- ``norms``: columns of equal size; ``energies``: columns of equal effect, norms times the channels' deviations;
- ``norms-and-biases``: the geometric mean of that by norms and what the locked gates themselves are, which differ less
  from the gains than it seems where a lock closes every gate by about as much;
- ``variances``: from there on, the gains that give every output's variance, by regularised least squares;
- ``means``: those that give the means too, which a block that adds to channels spoils.

``-recentred`` also takes what is guessed for the truth about means: the batch norm behind is to expect T(g·m), which
undoes whatever a block added. Without it the means stay as they are.

Gates of either sign leave a sign a channel to be guessed. Norms and variances don't tell; ``norms-and-biases`` takes
the locked gates' signs, ``means`` those that give the means, by regularised least squares, and the others none.
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
_RIDGE = 0.3  # how much the guess by sizes is worth beside the equations
_STEPS = 300


@dataclass(frozen=True)
class Guess:
    gains: Tensor
    mean: Tensor | None  # what the batch norm behind is to expect


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
    """Of columns, as the batch norm makes them: a row's own scale is none of theirs."""
    rows = layer.energies
    if layer.running_var is not None:
        rows = rows / layer.running_var[:, None]
    sizes = rows.mean(0).sqrt()
    if by_effect:
        sizes = sizes * layer.deviation.clamp(min=1e-3 * float(layer.deviation.max()))
    return sizes


def _scaled(layer: Behind, gains: Tensor) -> Tensor:
    """Times one number: for the variances that the batch norm remembers or, without one, rows of a norm like 1.5.

    (That is what rows of trained layers without batch norm have, by their initialisation √2.)
    """
    if layer.running_var is None:
        return gains * (1.5 / float((layer.white @ gains.square()).sqrt().median()))
    predicted = layer.energies @ (gains * layer.deviation).square()
    return gains * float((layer.running_var / predicted.clamp(min=1e-30)).median().sqrt())


def _signs(layer: Behind, gains: Tensor) -> Tensor:
    """Signs for gains of these sizes that come nearest to the remembered means."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    deviations = layer.running_var.sqrt()
    terms = layer.taps * (gains * layer.mean) / deviations[:, None]
    ridge = _RIDGE * float(terms.square().sum(0).mean()) * torch.eye(terms.shape[1], dtype=terms.dtype)
    factors = torch.linalg.solve(terms.T @ terms + ridge, terms.T @ (layer.running_mean / deviations))
    return torch.where(factors < 0, -1.0, 1.0).to(gains.dtype)


def _fitted(layer: Behind, start: Tensor, *, means: bool) -> Tensor:
    """Gains near a first guess that give the remembered statistics: logarithms of factors, by Adam."""
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
    """A copy with guessed gains in place of the new blocks."""
    found = {layer.name: (layer, guess(layer, way)) for layer in layers_behind(target)}
    stolen = taken_out(target, lambda name: found[name][1].gains)
    for layer, own in found.values():
        if own.mean is not None:
            layer.expect(stolen.model, own.mean)
    return stolen


def _run(subject: Subject, strength: Strength) -> Attacked:
    return Attacked(guessed(subject.target, str(strength)))


ATTACK = Attack("guess-gains", "thief", ("lock",), "nothing", STRENGTHS, _run,
                "new blocks taken out, gains guessed from weights and batch norms; strength is how")  # fmt: skip
