"""Trace many suspects among all clients at once: both rounds of `stainlock.fingerprints.trace`, as matrix products.

A bfloat16 product finds the scores near the threshold; only these are computed exactly. The second round's readings
take out the members whom the first round names, looking only at the coalition itself. If the first round names anyone
else, that trace has failed anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clients_models import secrets
from stainlock.fingerprints.streams import packed_codes, signs
from stainlock.fingerprints.tracing import LEVEL, scores, threshold_for, unit, without

_AT_ONCE = 4096  # clients per matrix product
_MARGIN = 0.2  # in units of z, many times the rounding error of bfloat16
_SIGNS = torch.from_numpy(signs(np.arange(256, dtype=np.uint8)[:, None])).bfloat16()


@dataclass(frozen=True)
class Found:
    """How many members and innocents a trace among all clients names, and the members' scores in the first round."""

    members: int
    innocents: int
    scores: NDArray[np.float64]


def trace_all(readings: NDArray[np.float64], sizes: list[int], clients: int) -> list[Found]:
    """Reading i is from a file made by clients 0 … sizes[i] − 1; clients 0 … ``clients`` − 1 are tested."""
    chips = readings.shape[1]
    threshold = threshold_for(clients, LEVEL)
    coalition = packed_codes(secrets(0, max(sizes)), chips)
    first = [unit(reading) for reading in readings]
    own = [scores(y, coalition[:size]) for y, size in zip(first, sizes, strict=True)]
    guilty = [np.flatnonzero(np.abs(z) > threshold) for z in own]
    second = [
        unit(without(reading, signs(coalition[named]).astype(np.float64))) if len(named) else np.zeros(chips)
        for reading, named in zip(readings, guilty, strict=True)
    ]
    named = [set(some.tolist()) for some in guilty]
    for number, client in _above(first + second, clients, threshold):
        named[number % len(readings)].add(client)
    return [
        Found(sum(client < size for client in some), sum(client >= size for client in some), z)
        for some, size, z in zip(named, sizes, own, strict=True)
    ]


def _above(ys: list[NDArray[np.float64]], clients: int, threshold: float) -> list[tuple[int, int]]:
    """Pairs of reading and client for which |score| exceeds the threshold."""
    together = torch.from_numpy(np.stack(ys, 1)).bfloat16()
    found = []
    for start in range(0, clients, _AT_ONCE):
        packed = packed_codes(secrets(start, min(clients, start + _AT_ONCE)), len(ys[0]))
        z = _codes(packed) @ together
        for client, number in (z.abs() > threshold - _MARGIN).nonzero().tolist():
            exact = float(scores(ys[number], packed[client : client + 1])[0])
            if abs(exact) > threshold:
                found.append((number, start + client))
    return found


def _codes(packed: NDArray[np.uint8]) -> Tensor:
    places = torch.from_numpy(packed.astype(np.int32)).flatten()
    return _SIGNS.index_select(0, places).view(len(packed), -1)
