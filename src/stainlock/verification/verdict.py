"""Verdicts: the answer of a verification, and how sure it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SIGNIFICANCE = 1e-6
# What nothing in a key can prove. The seed fixes everything random in it, the detectors that triggers are for included.
# But someone who has the suspect can try seeds, or images, until one fits.
ASSUMES = (
    "the key was fixed, triggers included, before the suspect and whatever it was made from, or without looking at them"
)
# The note on a negative verdict for a suspect with a keyed lock.
LOCKED = (
    "the suspect has a keyed lock, which hides a stain: open it first, with the lock's key as --lock-key FILE, or in"
    " Python key.opened(suspect)"
)


@dataclass(frozen=True)
class Verdict:
    """The answer, and how sure it is. ``channel`` is where the stain was found, if one was.

    ``assumes`` is what the p-value takes for granted; a dated commitment shows it.

    >>> verdict = sl.verify(stained, key)
    >>> verdict.stained, verdict.p_value < 1e-6, verdict.method
    (True, True, 'weights')
    """

    stained: bool
    p_value: float
    log10_p_value: float
    statistic: float
    method: str
    channel: int | None = None
    layer: str | None = None
    message: str | None = None
    note: str = ""
    largest_natural: float | None = None
    assumes: str | None = ASSUMES


def noted(verdict: Verdict, note: str) -> Verdict:
    """The verdict with this note added, unless it has it already."""
    return verdict if note in verdict.note else replace(verdict, note="; ".join(filter(None, (verdict.note, note))))


def concluded(verdict: Verdict, log_p: float, significance: float) -> Verdict:
    log_p = min(0.0, log_p)
    p_value = max(math.exp(log_p), 1e-300) if log_p > -690 else 1e-300
    return replace(verdict, stained=p_value <= significance, p_value=p_value, log10_p_value=log_p / math.log(10))
