"""Quadratic assignment, as far as a thief needs it: looks for the permutation p that maximises

    ½ Σ_ij A_ij B_{p(i)p(j)}  +  Σ_i L_{i p(i)}

for symmetric A and B with zero diagonals. The Frank–Wolfe method over doubly stochastic matrices runs from several
starts; then the best swap of two elements is applied as long as one helps.
"""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

_ROUNDS = 60  # at most this many Frank–Wolfe steps
_LEAST = 1e-9


def assign(gain: Tensor) -> Tensor:
    """The permutation p with the largest Σ gain[i, p(i)]."""
    return torch.from_numpy(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def solve(a: Tensor, b: Tensor, linear: Tensor, *, starts: int, generator: torch.Generator) -> Tensor:
    """The best permutation of several starts: the linear term's own, the uniform matrix, and random mixtures."""
    found = [climb(a, b, linear, _relaxed(a, b, linear, _start(linear, n, generator))) for n in range(starts)]
    return max(found, key=lambda order: value(a, b, linear, order))


def value(a: Tensor, b: Tensor, linear: Tensor, order: Tensor) -> float:
    return float((a * b[order][:, order]).sum() / 2 + linear[torch.arange(len(order)), order].sum())


def standardised(matrix: Tensor) -> Tensor:
    """Off-diagonal entries standardised to mean 0 and variance 1; the diagonal is 0."""
    off = ~torch.eye(len(matrix), dtype=torch.bool)
    values = matrix[off]
    return torch.where(off, (matrix - values.mean()) / values.std().clamp(min=_LEAST), 0.0)


def climb(a: Tensor, b: Tensor, linear: Tensor, order: Tensor) -> Tensor:
    """Applies the best swap of two elements as long as one helps."""
    order = order.clone()
    for _ in range(10 * len(order)):
        other, placed = b[order][:, order], linear[:, order]
        product = a @ other
        both = product + placed
        gain = both + both.T - both.diag()[:, None] - both.diag() + 2 * a * other
        first, second = divmod(int(gain.argmax()), len(order))
        if float(gain[first, second]) <= _LEAST:
            break
        order[[first, second]] = order[[second, first]]
    return order


def _start(linear: Tensor, number: int, generator: torch.Generator) -> Tensor:
    n = len(linear)
    if number == 1:
        return torch.full_like(linear, 1 / n)
    sharp, share = torch.rand(2, generator=generator).tolist()
    own = balanced((linear * (0.5 + 2 * sharp)).clamp(min=-50, max=6).exp() + _LEAST)
    noise = balanced(torch.rand(n, n, generator=generator, dtype=linear.dtype) ** 3 + 0.02)
    return own if number == 0 else share * own + (1 - share) * noise


def _relaxed(a: Tensor, b: Tensor, linear: Tensor, soft: Tensor) -> Tensor:
    rows = torch.arange(len(a))
    for _ in range(_ROUNDS):
        slope = a @ soft @ b + linear
        way = -soft
        way[rows, assign(slope)] += 1.0
        first, second = float((slope * way).sum()), float(((a @ way @ b) * way).sum()) / 2
        if first <= _LEAST:
            break
        soft = soft + (1.0 if second >= 0 else min(1.0, -first / (2 * second))) * way
    return assign(soft)


def balanced(matrix: Tensor, rounds: int = 30) -> Tensor:
    """Sinkhorn's method: scales the rows and columns of a positive matrix to sum to 1."""
    for _ in range(rounds):
        matrix = matrix / matrix.sum(0)
        matrix = matrix / matrix.sum(1, keepdim=True)
    return matrix
