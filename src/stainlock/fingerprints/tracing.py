"""Tracing: which clients' codes are in a reading.

A client's score is z = y·code / ‖y‖, where y is the reading. For a client who had no part in a suspect, the code's
signs are independent of y, whatever was done to the suspect, and by Hoeffding's inequality

    P(z > t)  ≤  exp(−t²/2),      P(|z| > t)  ≤  2 exp(−t²/2)

for every y, exactly. With N codes tested in R = 2 rounds, a client is named if

    p  =  2 · R · N · exp(−z²/2)  ≤  level,

so with probability at least 1 − level no innocent client is named. A score far below zero names a client too: their
copy was subtracted, as a coalition does to make some of its members look innocent.

Second round: the named clients' codes are projected out of y, and the others are scored again. For an innocent client
j, the clients named besides j are chosen without code_j, so the bound holds for the second y too, and the factor R is
enough. Only clients with |z| > 2 in the first round are scored again; scoring fewer can't name more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from stainlock.fingerprints.reading import Reading
from stainlock.fingerprints.streams import packed_codes, signs

LEVEL = 1e-6
ROUNDS, SIDES = 2, 2
_AT_ONCE = 4096  # clients per step
_AGAIN = 2.0  # |z| in the first round above which a client is scored again: limits the codes kept in memory


@dataclass(frozen=True)
class Accused:
    """A client who is named: the index of the secret among those tested, the score, and the corrected p-value.

    ``log10_p_value`` is needed because p-values below 1e−308 are 0 as floats. ``round`` is the round that named them.
    """

    client: int
    z: float
    p_value: float
    log10_p_value: float
    round: int = 1


@dataclass(frozen=True)
class Trace:
    """Who is named, most certain first, and every client's score in the first round."""

    accused: tuple[Accused, ...]
    scores: NDArray[np.float64]
    level: float
    threshold: float  # a client is named if |z| exceeds it

    @property
    def tested(self) -> int:
        return len(self.scores)


def trace(
    reading: Reading, client_secrets: Iterable[bytes], level: float = LEVEL, *, clients: int | None = None
) -> Trace:
    """Which of the clients with these secrets had a part in the suspect. Secrets may come from a generator of millions.

    ``clients`` is the number of tests to correct for, if these secrets are only some of those tested.
    """
    if not 0 < level < 1:
        raise ValueError(f"expected a level between 0 and 1, got {level}")
    weights = unit(reading.chips)
    found, again, kept = [np.zeros(0)], [np.zeros(0, np.int64)], [np.zeros((0, len(weights) // 8), np.uint8)]
    tested = 0
    for packed, z in _scored(weights, client_secrets):
        close = np.flatnonzero(np.abs(z) > _AGAIN)
        found.append(z)
        again.append(close + tested)
        kept.append(packed[close])
        tested += len(z)
    z, candidates, codes = np.concatenate(found), np.concatenate(again), np.concatenate(kept)
    looked_at = max(tested, clients or 0)
    threshold = threshold_for(looked_at, level)
    first = np.abs(z[candidates]) > threshold
    accused = [_accused(int(i), float(z[i]), looked_at, 1) for i in candidates[first]]
    if accused:
        rest = unit(without(reading.chips, signs(codes[first]).astype(np.float64)))
        second = scores(rest, codes[~first])
        more = np.abs(second) > threshold
        named = zip(candidates[~first][more], second[more], strict=True)
        accused += [_accused(int(i), float(score), looked_at, 2) for i, score in named]
    return Trace(tuple(sorted(accused, key=lambda a: a.log10_p_value)), z, level, threshold)


def scores(weights: NDArray[np.float64], packed: NDArray[np.uint8]) -> NDArray[np.float64]:
    """weights·code for every row of packed codes.

    For each byte of the codes, eight chips, the 256 possible sums are computed once and looked up.
    """
    tables = weights.reshape(-1, 8) @ signs(np.arange(256, dtype=np.uint8)[:, None]).T.astype(np.float64)
    columns = np.ascontiguousarray(packed.T)
    total, taken = np.zeros(len(packed)), np.empty(len(packed))
    for table, column in zip(tables, columns, strict=True):
        np.take(table, column, out=taken, mode="clip")
        total += taken
    return total


def threshold_for(tested: int, level: float) -> float:
    """The threshold on |z| above which a client is named."""
    return math.sqrt(2 * math.log(SIDES * ROUNDS * max(tested, 1) / level))


def log10_p_value(z: float, tested: int) -> float:
    """log10 of min(1, 2 · R · N · exp(−z²/2))."""
    return min(0.0, math.log10(SIDES * ROUNDS * max(tested, 1)) - z**2 / 2 / math.log(10))


def _accused(client: int, z: float, tested: int, number: int) -> Accused:
    log10 = log10_p_value(z, tested)
    return Accused(client, z, 10**log10, log10, number)


def _scored(
    weights: NDArray[np.float64], client_secrets: Iterable[bytes]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.float64]]]:
    """Codes and scores, thousands of clients at a time; a second thread scores while this one makes the next codes."""
    secrets = iter(client_secrets)
    with ThreadPoolExecutor(1) as other:
        before: tuple[NDArray[np.uint8], Future[NDArray[np.float64]]] | None = None
        while some := list(islice(secrets, _AT_ONCE)):
            packed = packed_codes(some, len(weights))
            if before is not None:
                yield before[0], before[1].result()
            before = packed, other.submit(scores, weights, packed)
        if before is not None:
            yield before[0], before[1].result()


def unit(chips: NDArray[np.float64]) -> NDArray[np.float64]:
    """A reading scaled to norm 1; zeros stay zeros."""
    norm = float(np.linalg.norm(chips))
    return chips / norm if norm > 0 else np.zeros_like(chips)


def without(chips: NDArray[np.float64], codes: NDArray[np.float64]) -> NDArray[np.float64]:
    """A reading with these codes projected out."""
    shares, *_ = np.linalg.lstsq(codes.T, chips, rcond=None)
    left: NDArray[np.float64] = chips - codes.T @ shares
    return left
