"""The key schedule: derives one secret permutation per gate from the bits and a salt.

    key     = the bits, repeated until there are 256
    stream  = ChaCha(key, nonce = salt), one 32-bit word r_i for every channel of every gate
    π       = the order of the words: argsort of (r_i, i)

A permutation drawn by sorting random words is uniform except for ties, which are broken by channel number: the sorted
numbers are 2²⁴·r_i + i. Someone who knows some gates has learned part of a keystream, from which neither the key nor
the rest of the stream can be computed. Flipping one key bit flips each bit of every word with probability one half. The
salt is public and drawn for each lock, so two locks with the same bits differ. Everything is integer arithmetic: the
permutations are the same for every device, dtype and thread count.

A scattered layer has a separate order for each of its R rows. Drawing each by itself would take one word per weight.
Instead K = ⌈√R⌉ permutations σ and K permutations τ are drawn, from half words: row r has τ_{⌊r/K⌋} ∘ σ_{r mod K}, a
different pair for every row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.gating.chacha import keystream

KEY_BITS, WORD = 256, 32
_INDEX_BITS, _HALF = 24, 16


@dataclass(frozen=True)
class Schedule:
    """The public part of a key schedule: the salt, the cipher's rounds, the width of every gate that orders channels,
    and the rows and columns of every scattered layer."""

    salt: tuple[int, int, int]
    rounds: int
    widths: tuple[int, ...]
    scattered: tuple[tuple[int, int], ...] = ()

    def permutations(self, bits: Tensor) -> list[Tensor]:
        """For every row of bits ``(N, B)``, in int64: π of every gate ``(N, width)``, then σ and τ of every scattered
        layer ``(N, 2, K, columns)``."""
        pools = [2 * _pool(rows) * columns for rows, columns in self.scattered]
        words = sum(self.widths) + sum(math.ceil(size / 2) for size in pools)
        stream = keystream(pack_key(bits), self.salt, math.ceil(words / 16), self.rounds)
        found: list[Tensor | None] = [None] * len(self.widths)
        start = 0
        for width in sorted(set(self.widths)):
            same = [gate for gate, other in enumerate(self.widths) if other == width]
            own = stream[:, start : start + width * len(same)].reshape(-1, len(same), width)
            start += width * len(same)
            orders = _order(own)
            for place, gate in enumerate(same):
                found[gate] = orders[:, place]
        mixed = []
        for (rows, columns), size in zip(self.scattered, pools, strict=True):
            own = stream[:, start : start + math.ceil(size / 2)]
            start += own.shape[1]
            halves = torch.cat([own & ((1 << _HALF) - 1), own >> _HALF], 1)[:, :size]
            mixed.append(_order(halves.reshape(-1, 2, _pool(rows), columns)))
        return [order for order in found if order is not None] + mixed


def row_orders(pools: Tensor, rows: int) -> Tensor:
    """τ_{⌊r/K⌋} ∘ σ_{r mod K} of every row: ``(N, rows, columns)`` from ``(N, 2, K, columns)``."""
    row = torch.arange(rows, device=pools.device)
    first, second = pools[:, 0].index_select(1, row % _pool(rows)), pools[:, 1].index_select(1, row // _pool(rows))
    return second.gather(-1, first)


def pack_key(bits: Tensor) -> Tensor:
    """Bits ``(N, B)`` as a cipher's key: ``(N, 8)`` words of 32 bits in int64, the first bit lowest."""
    repeated = bits.repeat(1, math.ceil(KEY_BITS / bits.shape[1]))[:, :KEY_BITS]
    weights = torch.tensor([1 << place for place in range(WORD)], device=bits.device)
    return (repeated.long().view(-1, KEY_BITS // WORD, WORD) * weights).sum(-1)


def check_widths(widths: Sequence[int]) -> None:
    if max(widths, default=0) >= 1 << _INDEX_BITS:
        raise ValueError(f"expected layers of fewer than {1 << _INDEX_BITS} channels, got {max(widths)}")


def _order(words: Tensor) -> Tensor:
    """The permutation that sorts the last axis; equal words keep their order."""
    numbers = words * (1 << _INDEX_BITS) + torch.arange(words.shape[-1], device=words.device)
    return numbers.sort(-1).values & ((1 << _INDEX_BITS) - 1)


def _pool(rows: int) -> int:
    return math.ceil(math.sqrt(rows))
