"""State that the gates of a lock share during one call of the model: the permutations that the reader derived.

Each thread and each call has its own frame, so two threads can run the same model, and one model can be inside another.
Frames are not part of the model: neither copies nor files of the model contain them.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from stainlock.gating.schedule import Schedule, row_orders

# Number of locks whose latest permutations a thread caches.
_KEPT = 4


class Orders:
    """The permutations of all gates in one call; inverses are computed on first use."""

    def __init__(self, orders: list[Tensor]) -> None:
        self.orders = orders
        self._inverses: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}

    def inverse(self, gate: int) -> Tensor:
        """The inverse ``(C,)`` of a permutation that all images share."""
        if gate not in self._inverses:
            with torch.inference_mode(False), torch.no_grad():
                self._inverses[gate] = self.orders[gate][0].argsort()
        return self._inverses[gate]

    def rows(self, gate: int, count: int) -> Tensor:
        """``(N, count, columns)``: the order of the weights in each row of a scattered layer."""
        if gate not in self._rows:
            with torch.inference_mode(False), torch.no_grad():
                self._rows[gate] = row_orders(self.orders[gate], count)
        return self._rows[gate]


class _Frames(threading.local):
    """For each lock, the stack of calls that this thread is in, each with its permutations once they have been read.

    The latest bits of a few locks are cached with their permutations, since most batches carry the same key as the
    previous one.
    """

    def __init__(self) -> None:
        self.stacks: dict[str, list[Orders | None]] = {}
        self.last: dict[Schedule, tuple[Tensor, Orders]] = {}

    def permutations(self, schedule: Schedule, bits: Tensor) -> Orders:
        before = self.last.get(schedule)
        if before is not None and before[0].device == bits.device and torch.equal(before[0], bits):
            return before[1]
        if len(self.last) >= _KEPT:
            self.last.clear()
        found = Orders(schedule.permutations(bits))
        self.last[schedule] = bits, found
        return found


FRAMES = _Frames()


def is_traced() -> bool:
    """Whether operations are being recorded to run on other images: then nothing may depend on the current values."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return traced or torch.compiler.is_compiling()
