"""What the gates of a lock share during one call of the model: the permutations that the reader derived.

A frame belongs to the thread and to the call, so that two threads may run one model, and one model may be inside
another. Nothing of it belongs to the model: neither a copy nor a file of the model has it.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from stainlock.gating.schedule import Schedule

# Locks whose last permutations a thread keeps.
_KEPT = 4


class Orders:
    """The permutations of all gates in one call; their inverses are made when they are first asked for."""

    def __init__(self, orders: list[Tensor]) -> None:
        self.orders = orders
        self._inverses: dict[int, Tensor] = {}

    def inverse(self, gate: int) -> Tensor:
        """``(C,)``, of a permutation that all images have in common."""
        if gate not in self._inverses:
            with torch.inference_mode(False), torch.no_grad():
                self._inverses[gate] = self.orders[gate][0].argsort()
        return self._inverses[gate]


class _Frames(threading.local):
    """For each lock the stack of calls that this thread is in: the gates' permutations of each, once they are read.

    The last bits of a few locks are kept with their permutations, since most batches carry the same key as the one
    before. Nothing of it belongs to the model, so that neither a copy nor a file of the model has it.
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
    """Whether operations are recorded, to be run on other images: nothing may depend on what these hold."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return traced or torch.compiler.is_compiling()
