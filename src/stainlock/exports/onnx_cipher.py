"""A keyed lock's cipher in ONNX. For the exporter it is one operation, which becomes the nodes written here.

Followed one by one, the cipher's tensor operations are most of a small model's graph, and exporting takes several times
as long. ONNX shifts only unsigned words: w ⋘ k is here y + ⌊y / 2³²⌋ with y = w · 2ᵏ, of which the low 32 bits count.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from stainlock.gating.chacha import CONSTANTS, INSTEAD, MASK, by_tensors

_LIBRARY = torch.library.Library("stainlock", "DEF")
_LIBRARY.define("keystream(Tensor key, int[] nonce, int blocks, int rounds) -> Tensor")
_LIBRARY.impl("keystream", by_tensors, "CompositeExplicitAutograd")
torch.library.register_fake(
    "stainlock::keystream",
    lambda key, nonce, blocks, rounds: key.new_empty((key.shape[0], 16 * blocks)),
    lib=_LIBRARY,
)


@contextlib.contextmanager
def cipher_as_one_operation() -> Iterator[dict[Callable[..., Any], Callable[..., Any]]]:
    """In this context, exported models contain the cipher as one operation.

    Yields the translation to ONNX that ``torch.onnx.export`` takes.
    """
    operation: Any = torch.ops.stainlock.keystream
    token = INSTEAD.set(operation)
    try:
        yield {operation.default: _keystream}
    finally:
        INSTEAD.reset(token)


def _keystream(key: Any, nonce: Sequence[int], blocks: int, rounds: int) -> Any:
    """`stainlock.gating.chacha.by_tensors`, written as ONNX operations."""
    op: Any = importlib.import_module("onnxscript").opset18
    mask, beyond = _constant(MASK), _constant(1 << 32)
    factors = {places: _constant(1 << places) for places in (16, 12, 8, 7)}
    turns = {places: _constant([(i + places) % 4 for i in range(4)]) for places in (1, 2, 3)}

    def rotate(words: Any, places: int) -> Any:
        product = op.Mul(op.BitwiseAnd(words, mask), factors[places])
        return op.Add(product, op.Div(product, beyond))

    def quarter_rounds(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any, Any]:
        for first, second in ((16, 12), (8, 7)):
            a = op.Add(a, b)
            d = rotate(op.BitwiseXor(d, a), first)
            c = op.Add(c, d)
            b = rotate(op.BitwiseXor(b, c), second)
        return a, b, c, d

    def turned(words: Sequence[Any], places: Sequence[int]) -> list[Any]:
        return [op.Gather(row, turns[by], axis=1) for row, by in zip(words, places, strict=True)]

    a = _constant(np.reshape(CONSTANTS, (1, 4, 1)))
    b, c = op.Split(op.Unsqueeze(key, _constant([2])), num_outputs=2, axis=1)
    d = _constant(np.stack([np.arange(blocks), *(np.full(blocks, word) for word in nonce)])[None])
    start = (a, b, c, d)
    for _ in range(rounds // 2):
        a, b, c, d = quarter_rounds(a, b, c, d)
        b, c, d = turned((b, c, d), (1, 2, 3))
        a, b, c, d = quarter_rounds(a, b, c, d)
        b, c, d = turned((b, c, d), (3, 2, 1))
    rows = [op.Add(before, after) for before, after in zip(start, (a, b, c, d), strict=True)]
    return op.Flatten(op.Transpose(op.BitwiseAnd(op.Concat(*rows, axis=1), mask), perm=[0, 2, 1]), axis=1)


def _constant(numbers: Any) -> Any:
    onnx, onnxscript = importlib.import_module("onnx"), importlib.import_module("onnxscript")
    return onnxscript.opset18.Constant(value=onnx.numpy_helper.from_array(np.asarray(numbers, np.int64)))
