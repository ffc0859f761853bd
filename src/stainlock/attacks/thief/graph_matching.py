"""Matching two symmetric matrices whose rows are in different orders: which row of B is row i of A?

Both are standardised off their diagonals, and the right order p gives them a correlation ρ:

    ρ(p) = mean over i ≠ j of A_ij B_{p(i)p(j)}

Local search alone finds poor maxima. Two methods often lead to the right one if ρ is well above 0.5; the best result
counts.

- Graduated assignment (Gold and Rangarajan, 1996): a soft permutation P, which begins with how alike the sorted rows
  are, becomes sharper while P ← Sinkhorn(exp(β A P B)).
- Seeds: a strong pair (i, i') of A and one of B are assumed to be the same. Six more rows are added one by one, each
  the most likely next one if entries are jointly Gaussian with correlation ρ. All rows then follow from these eight.
  A few right seeds are enough, so many pairs are tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stainlock.attacks.thief.assignment import assign, climb, standardised

_SHARPNESS = torch.logspace(0, 2, 25).tolist()  # β of graduated assignment
_BALANCING, _STEPS_EACH = 10, 3
_PROFILE = 128  # number of quantiles compared of two sorted rows
# Number of strongest pairs of each matrix that are tried as seeds; half the rows in matrices with fewer rows than this.
_STRONG, _SMALL = 80, 64
_SEEDS, _ASSUMED = 8, 0.7  # number of seeds, and the ρ assumed while they are collected
_GROWN = 60  # number of seed sets, the most consistent ones, that are grown to whole orders
_NEVER, _ALWAYS = -1e9, 1e9
_ROUNDS = 30


def match(a: Tensor, b: Tensor) -> tuple[Tensor, float]:
    """The order p found, and its ρ; signed entries and their sizes are both tried."""
    found = []
    for first, second in ((a, b), (a.abs(), b.abs())):
        own, other = standardised(first), standardised(second)
        starts = [_graduated(own, other), *_from_seeds(own, other)]
        begun = max(starts, key=lambda order: correlation(own, other, order))
        order = climb(own, other, torch.zeros_like(own), _refined(own, other, begun))
        found.append((order, correlation(own, other, order)))
    return max(found, key=lambda result: result[1])


def correlation(a: Tensor, b: Tensor, order: Tensor) -> float:
    """ρ of an order, for standardised matrices."""
    return float((a * b[order][:, order]).sum()) / (len(a) * (len(a) - 1))


def _graduated(a: Tensor, b: Tensor) -> Tensor:
    chosen = torch.linspace(0, len(a) - 1, min(len(a), _PROFILE)).long()
    profiles = [matrix.sort(1).values[:, chosen] for matrix in (a, b)]
    alike = _scaled(-torch.cdist(profiles[0], profiles[1])).float()
    soft = _balanced(3 * alike)
    first, second = a.float(), b.float()
    for sharpness in _SHARPNESS:
        for _ in range(_STEPS_EACH):
            soft = _balanced(sharpness * _scaled(first @ soft @ second) + sharpness / (1 + sharpness) * alike)
    return assign(soft.double())


def _balanced(logs: Tensor) -> Tensor:
    """Sinkhorn's method on logarithms."""
    for _ in range(_BALANCING):
        logs = logs - logs.logsumexp(1, keepdim=True)
        logs = logs - logs.logsumexp(0, keepdim=True)
    return logs.exp()


def _scaled(matrix: Tensor) -> Tensor:
    return (matrix - matrix.mean()) / matrix.std().clamp(min=1e-12)


def _from_seeds(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    collected = [_collected(a, b, mine, theirs) for mine, theirs in _strong_pairs(a, b)]
    collected.sort(key=lambda seeds: seeds[0], reverse=True)
    distinct = {frozenset(zip(mine, theirs, strict=True)): (mine, theirs) for _, mine, theirs in collected[:_GROWN]}
    for mine, theirs in distinct.values():
        gain = a[:, mine] @ b[theirs]
        gain[mine], gain[:, theirs] = _NEVER, _NEVER
        gain[mine, theirs] = _ALWAYS
        yield _refined(a, b, assign(gain), rounds=2)


def _strong_pairs(a: Tensor, b: Tensor) -> Iterator[tuple[list[int], list[int]]]:
    rows, columns = torch.triu_indices(len(a), len(a), 1)
    count = _STRONG if len(a) >= _SMALL else len(a) // 2
    first, second = (
        [(int(rows[e]), int(columns[e])) for e in matrix[rows, columns].abs().argsort(descending=True)[:count]]
        for matrix in (a, b)
    )
    for i, j in first:
        for k, m in second:
            if float(a[i, j] * b[k, m]) > 0:
                yield [i, j], [k, m]
                yield [i, j], [m, k]


def _collected(a: Tensor, b: Tensor, mine: list[int], theirs: list[int]) -> tuple[float, list[int], list[int]]:
    """More seeds, the likeliest first, and how well all of them agree."""
    count = min(_SEEDS, len(a))
    likely = _likelihood(a[:, mine], b[:, theirs])
    while True:
        likely[mine], likely[:, theirs] = _NEVER, _NEVER
        if len(mine) == count:
            break
        i, k = divmod(int(likely.argmax()), len(a))
        mine, theirs = [*mine, i], [*theirs, k]
        likely += _likelihood(a[:, [i]], b[:, [k]])
    own, other = a[mine][:, mine], b[theirs][:, theirs]
    return float((own * other - (own - other).square()).sum()), mine, theirs


def _likelihood(a: Tensor, b: Tensor) -> Tensor:
    """The log-likelihood ratio, up to a factor, that row i of ``a`` is row k of ``b``."""
    sizes = a.square().sum(1)[:, None] + b.square().sum(1)
    return _ASSUMED * (a @ b.T) - _ASSUMED**2 / 2 * sizes


def _refined(a: Tensor, b: Tensor, order: Tensor, rounds: int = _ROUNDS) -> Tensor:
    """Reassign every row by how well it fits all the others, until nothing changes."""
    for _ in range(rounds):
        following = assign(a @ b[order])
        if torch.equal(following, order):
            break
        order = following
    return order
