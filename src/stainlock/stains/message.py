"""Messages as signs: tolerant of errors, and unreadable without the key.

The bits of a message and its checksum are each repeated over many places; a secret stream shuffles the places and flips
signs. The signs then look random. A uniform vector with random signs is still uniform on the sphere, so the detector's
guarantees hold. Reading weights each place by the size of its value: weights set to zero count for nothing.
"""

from __future__ import annotations

import binascii
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CHECK_BYTES = 2
# Every bit is written to at least this many places.
_LEAST_REPETITION = 3


@dataclass(frozen=True)
class Mask:
    """A secret order of the places, and a secret sign for each."""

    order: NDArray[np.int64]
    flips: NDArray[np.float64]


@dataclass(frozen=True)
class Reading:
    """The text (None if its checksum fails), and the number of places that hold the sign it implies."""

    text: str | None
    agreeing: int
    places: int


def capacity(places: int) -> int:
    """The number of bytes of UTF-8 text that fit into this many signs."""
    return max(0, places // (8 * _LEAST_REPETITION) - _CHECK_BYTES)


def places_needed(text: str) -> int:
    """The minimum number of signs for a text."""
    return (len(text.encode()) + _CHECK_BYTES) * 8 * _LEAST_REPETITION


def encode(text: str, mask: Mask) -> NDArray[np.float64]:
    """The ±1 signs that carry the text, one for each place of the mask."""
    content, places = text.encode(), len(mask.order)
    if not content:
        raise ValueError("expected a message of at least one character, got an empty one")
    if len(content) > capacity(places):
        raise ValueError(
            f"expected a message of at most {capacity(places)} bytes ({places} signs here), got {len(content)}"
        )
    return _repeated(_frame(content), mask.order) * mask.flips


def decode(values: NDArray[np.float64], length: int, mask: Mask) -> Reading:
    """The most likely text of ``length`` bytes behind noisy values."""
    order, flips = mask.order, mask.flips
    bits = 8 * (length + _CHECK_BYTES)
    votes = np.zeros(bits)
    np.add.at(votes, order % bits, values * flips)
    frame = np.packbits(votes > 0).tobytes()
    content, check = frame[:length], frame[length:]
    intact = check == _check(content)
    agreeing = int((np.sign(values) == _repeated(np.unpackbits(np.frombuffer(frame, np.uint8)), order) * flips).sum())
    return Reading(content.decode(errors="replace") if intact else None, agreeing, len(values))


def _frame(content: bytes) -> NDArray[np.uint8]:
    return np.unpackbits(np.frombuffer(content + _check(content), np.uint8))


def _check(content: bytes) -> bytes:
    return binascii.crc_hqx(content, 0).to_bytes(_CHECK_BYTES, "big")


def _repeated(bits: NDArray[np.uint8], order: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(bits[order % len(bits)] == 1, 1.0, -1.0)
