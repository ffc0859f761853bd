"""ChaCha (Bernstein 2008; RFC 8439) as ordinary integer tensor operations, which can be exported.

The state is four rows of four 32-bit words: constants, key, key, and counter with nonce. A quarter round is

    a += b;  d = (d ⊕ a) ⋘ 16;   c += d;  b = (b ⊕ c) ⋘ 12;   a += b;  d = (d ⊕ a) ⋘ 8;   c += d;  b = (b ⊕ c) ⋘ 7

on all four columns at once, then on the diagonals. Blocks differ only in their counter and are computed in parallel.

Words are held in int64, where nothing overflows. Only the low 32 bits count, and words are masked before they are
rotated, so sums and rotated words may have garbage above bit 32 (less than 2⁵⁵ after 20 rounds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

ROUNDS = (8, 12, 20)
MASK = 0xFFFFFFFF
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
# What computes the keystream while a model is exported to ONNX, if not `by_tensors`.
INSTEAD: ContextVar[Callable[[Tensor, Sequence[int], int, int], Tensor] | None] = ContextVar("INSTEAD", default=None)


def keystream(key: Tensor, nonce: Sequence[int], blocks: int, rounds: int) -> Tensor:
    """The first ``blocks`` blocks for keys ``(N, 8)``: ``(N, 16 · blocks)``; both are 32-bit words in int64.

    The nonce has three words; the counter starts at 0.
    """
    instead = INSTEAD.get() if torch.onnx.is_in_onnx_export() else None
    return (instead or by_tensors)(key, nonce, blocks, rounds)


def by_tensors(key: Tensor, nonce: Sequence[int], blocks: int, rounds: int) -> Tensor:
    """`keystream` by tensor operations, also while a model is exported."""
    counter = torch.arange(blocks, device=key.device)
    a = torch.tensor(CONSTANTS, device=key.device).view(1, 4, 1)
    b, c = key[:, :4, None], key[:, 4:, None]
    words = [counter, *(torch.full_like(counter, word) for word in nonce)]
    d = torch.stack(words)[None]
    start = (a, b, c, d)
    one, two, three = (torch.tensor([(i + k) % 4 for i in range(4)], device=key.device) for k in (1, 2, 3))
    for _ in range(rounds // 2):
        a, b, c, d = _quarter_rounds(a, b, c, d)
        b, c, d = b.index_select(1, one), c.index_select(1, two), d.index_select(1, three)
        a, b, c, d = _quarter_rounds(a, b, c, d)
        b, c, d = b.index_select(1, three), c.index_select(1, two), d.index_select(1, one)
    rows = [before + after for before, after in zip(start, (a, b, c, d), strict=True)]
    return (torch.cat(rows, 1) & MASK).transpose(1, 2).flatten(1)


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = a + b
    d = _rotate(d ^ a, 16)
    c = c + d
    b = _rotate(b ^ c, 12)
    a = a + b
    d = _rotate(d ^ a, 8)
    c = c + d
    b = _rotate(b ^ c, 7)
    return a, b, c, d


def _rotate(words: Tensor, places: int) -> Tensor:
    """Rotate left by fewer than 32 places.

    ONNX can shift only unsigned words, and its exporter turns a signed right shift into nine operations. For ONNX the
    word is instead scaled by a power of two in float64, which is exact, and truncated.
    """
    words = words & MASK
    if torch.onnx.is_in_onnx_export():
        return words * (1 << places) + (words.double() * 2.0 ** (places - 32)).long()
    return (words << places) + (words >> (32 - places))
