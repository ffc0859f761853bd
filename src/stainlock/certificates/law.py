"""How a detector was drawn: all that bounds for a random detector need to know.

A stain's detector is uniform on the sphere. A lock's is the best of a few draws, and at a padded corner only the part
of the kernel that the corner sees is random. With w uniform on a sphere of that dimension, a size a, and a veto that is
never positive,

    v·φ = a w·φ_seen + veto ≤ a w·φ_seen,        so        P(v·φ > Δ) ≤ P(w·φ > Δ/a)

where the norm of φ may be used instead of that of the part seen. The best of n draws exceeds Δ only if one of the n
does: n times the bound. Which draw was the best was decided without the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from stainlock.facts import ConvolutionalFacts
from stainlock.key import Key


@dataclass(frozen=True)
class Law:
    """The best of ``draws`` vectors: ``size`` times a uniform unit vector of ``dimension``, plus the veto."""

    dimension: int
    size: float = 1.0
    draws: int = 1

    @staticmethod
    def of(key: Key) -> Law:
        if key.kind == "stain":
            return Law(key.dimension)
        try:
            facts = ConvolutionalFacts.of(key)
            return Law(facts.free_dimension, facts.free_size, facts.restarts)
        except KeyError:
            raise ValueError(
                f"expected the key of a stain or of a convolutional lock to certify with, got a {key.schema} lock's"
            ) from None
