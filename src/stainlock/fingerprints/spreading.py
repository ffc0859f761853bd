"""Spreading a code over a tensor's weights, and folding weights back onto the chips.

A tensor's weights, in row-major order, are cut into pages of B = 1024. Page p of a tensor carries the chips of block
k = (first + p) mod (m/B), mixed by a Hadamard matrix H between two rows of secret signs:

    spread   x_p  =  s_p ⊙ H (t_p ⊙ code_k) / √B           every weight carries all chips of its block
    fold     y_k  =  Σ_p  t_p ⊙ H (s_p ⊙ u_p) / √B         the transpose: fold(spread(code)) = pages · code

H has orthogonal rows, so nothing is lost. A weight's mark is a scaled sum of 1024 signs, very close to normal:
colluders with many copies do not see two levels with the base in the middle. Its values are multiples of 1/32,
computed without rounding in any order of addition.

A tensor's stream (`stainlock.fingerprints.streams`) has 8 bytes for ``first``, a big-endian number, and then for each
page 128 bytes for s_p and 128 for t_p. If the last page is not full, the missing weights count as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from stainlock.fingerprints.layout import PAGE, Layout
from stainlock.fingerprints.streams import keystream, signs, tensor_secret

_SIDE = 32
_ROW = PAGE // 8
_AT_ONCE = 256  # pages per step: intermediate values stay in the processor's cache


def _hadamard(size: int) -> Tensor:
    """Sylvester's: H_{2n} = [[H, H], [H, −H]]."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


_HADAMARD = _hadamard(_SIDE)


def mix(pages: Tensor) -> Tensor:
    """H times every page, divided by √B. H is H_32 ⊗ H_32 followed by transposing the page as a 32×32 matrix: the
    operation is its own transpose and inverse.
    """
    rows = pages.reshape(-1, _SIDE) @ _HADAMARD
    turned = rows.view(-1, _SIDE, _SIDE).transpose(1, 2).reshape(-1, _SIDE)
    return (turned @ _HADAMARD).view(-1, PAGE).div_(_SIDE)


def _pages(layout: Layout, name: str, count: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """A tensor in parts: the slice of its weights, s and t of their pages, and each page's block of chips."""
    pages = -(-count // PAGE)
    stream = np.frombuffer(keystream(tensor_secret(layout.secret, name), 8 + 2 * _ROW * pages), np.uint8)
    blocks = layout.chips // PAGE
    first = int.from_bytes(stream[:8].tobytes(), "big") % blocks
    rows = stream[8:].reshape(pages, 2, _ROW)
    for start in range(0, pages, _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        s, t = (torch.from_numpy(signs(part[:, i])) for i in (0, 1))
        block = (first + torch.arange(start, start + len(part))) % blocks
        yield slice(start * PAGE, min(count, (start + len(part)) * PAGE)), s, t, block


def spread(layout: Layout, name: str, code: Tensor) -> Tensor:
    """The mark of one tensor, in its shape and with variance 1, for a code of ±1 in float32."""
    shape = layout.shapes[name]
    count = torch.Size(shape).numel()
    blocks = code.view(-1, PAGE)
    mark = torch.empty(count)
    for weights, s, t, block in _pages(layout, name, count):
        mark[weights] = mix(t * blocks[block]).mul_(s).flatten()[: weights.stop - weights.start]
    return mark.view(shape)


def fold(layout: Layout, name: str, values: Tensor) -> Tensor:
    """Sum one value per weight of a tensor onto the chips: ``(m,)`` in float64."""
    flat = values.reshape(-1).float()
    chips = torch.zeros(layout.chips // PAGE, PAGE, dtype=torch.float64)
    for weights, s, t, block in _pages(layout, name, len(flat)):
        page = torch.zeros(len(s), PAGE)
        page.view(-1)[: weights.stop - weights.start] = flat[weights]
        chips.index_add_(0, block, (mix(page * s) * t).double())
    return chips.flatten()
