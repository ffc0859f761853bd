"""The marks of `peers.py`, each in a copy of the same model, and how to detect each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom
from torch import Tensor

import peers_spread_spectrum
import peers_uchida
from stainlock import Key, Target, stain, verify
from stainlock.verification import SIGNIFICANCE, Reference

TEXT = "A. N. Owner, 2026"
Bits = NDArray[np.uint8]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Found:
    """The result of searching for a mark: log10 of the p-value, and what was read."""

    log10_p: float
    read: str

    @property
    def sure(self) -> bool:
        return self.log10_p <= math.log10(SIGNIFICANCE)

    def __str__(self) -> str:
        p = f"1e−{-self.log10_p:.0f}" if self.log10_p < -2 else f"{10**self.log10_p:.2f}"
        return f"{'**found**' if self.sure else 'not found'}, p {p}, {self.read}"


@dataclass(frozen=True)
class Marked:
    """A marked model, a function that searches for its mark, and the cost of embedding."""

    method: str
    target: Target
    look: Callable[[Target], Found]
    needs: str
    carries: str
    seconds: float  # processor time, one core
    key: Key | None = None  # only for stains


def stained(target: Target, seed: int, *, additive: bool) -> Marked:
    """One of our stains. A replacing stain can carry a text, an additive one can't."""
    how: dict[str, Any] = {"additive": True} if additive else {"schema": "weight", "message": TEXT}
    (marked, key), seconds = _timed(lambda: stain(target, seed=seed, **how))
    reference = Reference.of(target, key, decoys=0)

    def look(suspect: Target) -> Found:
        verdict = verify(suspect, key, reference=reference)
        text = "" if additive else ", text read" if verdict.message == TEXT else ", text not read"
        return Found(verdict.log10_p_value, f"by {verdict.method}{text}")

    carries = "nothing" if additive else f"{8 * len(TEXT.encode())} bits"
    method = "stain, additive" if additive else "stain, replacing"
    return Marked(method, marked, look, "nothing", carries, seconds, key)


def spread(target: Target, seed: int) -> Marked:
    (marked, mark), seconds = _timed(lambda: peers_spread_spectrum.embed(target, seed=seed))
    look = by_bits(mark.message, mark.extract)
    return Marked("spread spectrum (TATTOOED)", marked, look, "nothing", f"{len(mark.message)} bits", seconds)


def trained_in(target: Target, layer: str, images: Tensor, labels: Tensor, seed: int) -> Marked:
    (marked, mark), seconds = _timed(lambda: peers_uchida.embed(target, layer, images, labels, seed=seed))
    look = by_bits(mark.message, mark.extract)
    needs = f"{len(images)} labelled images, {peers_uchida.STEPS} steps of training"
    return Marked("regulariser (Uchida)", marked, look, needs, f"{len(mark.message)} bits", seconds)


def by_bits(message: Bits, extract: Callable[[dict[str, Tensor]], Bits]) -> Callable[[Target], Found]:
    """The binomial tail: a model made without the message matches each of its random bits with probability ½."""

    def look(suspect: Target) -> Found:
        right = int((extract(weights_of(suspect)) == message).sum())
        log_p = float(binom.logsf(right - 1, len(message), 0.5))
        return Found(log_p / math.log(10), f"{right} of {len(message)} bits")

    return look


def weights_of(target: Target) -> dict[str, Tensor]:
    """Every layer's weight by the layer's name; quantised weights are converted to float32."""
    found = {}
    for name, module in target.model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if weight is not None and not isinstance(weight, Tensor):
            weight = weight().dequantize()  # quantised layers have a method instead of a tensor
        if weight is not None:
            found[name] = weight.detach()
    return found


def _timed(make: Callable[[], Made]) -> tuple[Made, float]:
    """The result, and the processor time it took (elapsed time would include other load on the machine)."""
    start = time.process_time()
    made = make()
    return made, time.process_time() - start
