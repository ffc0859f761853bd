"""The key schedule: bits and a salt to one secret permutation for every gate.

    key     = the bits, repeated until there are 256
    stream  = ChaCha(key, nonce = salt), one 32-bit word r_i for every channel of every gate
    π       = the order of the words: argsort of (r_i, i)

A permutation drawn by sorting random words is uniform up to ties, which the channel's own number breaks: the numbers
sorted are 2²⁴·r_i + i. Who knows some gates has learned part of a keystream, from which neither the key nor the rest of
the stream can be computed; a bit that differs changes every word with probability one half a bit. The salt is public
and drawn for each lock, so that two locks with the same bits differ. All of it is integer arithmetic: every device,
dtype and thread count gets the same permutations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stainlock.gating.chacha import keystream

KEY_BITS, WORD = 256, 32
_INDEX_BITS = 24


@dataclass(frozen=True)
class Schedule:
    """What is public of a key schedule: the salt, the cipher's rounds, and the width of every gate."""

    salt: tuple[int, int, int]
    rounds: int
    widths: tuple[int, ...]

    def permutations(self, bits: Tensor) -> list[Tensor]:
        """π of every gate for every row of bits ``(N, B)``: a list of ``(N, width)``, int64."""
        words = sum(self.widths)
        stream = keystream(pack_key(bits), self.salt, math.ceil(words / 16), self.rounds)
        found: list[Tensor | None] = [None] * len(self.widths)
        start = 0
        for width in sorted(set(self.widths)):
            same = [gate for gate, other in enumerate(self.widths) if other == width]
            own = stream[:, start : start + width * len(same)].reshape(-1, len(same), width)
            start += width * len(same)
            numbers = own * (1 << _INDEX_BITS) + torch.arange(width, device=bits.device)
            orders = numbers.sort(-1).values & ((1 << _INDEX_BITS) - 1)
            for place, gate in enumerate(same):
                found[gate] = orders[:, place]
        return [order for order in found if order is not None]


def pack_key(bits: Tensor) -> Tensor:
    """Bits ``(N, B)`` as a cipher's key: ``(N, 8)`` words of 32 bits in int64, the first bit lowest."""
    repeated = bits.repeat(1, math.ceil(KEY_BITS / bits.shape[1]))[:, :KEY_BITS]
    weights = torch.tensor([1 << place for place in range(WORD)], device=bits.device)
    return (repeated.long().view(-1, KEY_BITS // WORD, WORD) * weights).sum(-1)


def check_widths(widths: Sequence[int]) -> None:
    if max(widths, default=0) >= 1 << _INDEX_BITS:
        raise ValueError(f"expected layers of fewer than {1 << _INDEX_BITS} channels, got {max(widths)}")
