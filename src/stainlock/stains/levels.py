"""Levels: the pre-activations a detector gives at its trigger (Δ) and at rest (δ).

With R the trigger's response and ρ₀ the firing fraction, a non-additive detector's pre-activation is the line

    p(y) = s + m·(y − ρ₀R),        y = v·φ(x),

where s is the level below which the activation is silent (0 for ReLU). It leaves silence where the response
passes ρ₀R. Then Δ = p(R) = s + m(1 − ρ₀)R and δ = p(0) = s − mρ₀R; for ReLU, δ = −ρ₀Δ/(1 − ρ₀).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stainlock.network.activations import Activation

FIRING_FRACTION = 0.65
# A patch covers all that its position sees, so that every image gives the same response: a lock's can be high.
LOCK_FIRING_FRACTION = 0.8
# An activation that is silent only far below zero needs a detector that climbs out of it.
_LEAST_TRIGGER_LEVEL = 1.0


@dataclass(frozen=True)
class Natural:
    """Of a detector's responses to inputs that need no data: v·φ, v of length 1, over all positions."""

    largest: float
    mean: float
    deviation: float

    @staticmethod
    def of(responses: Tensor) -> Natural:
        flat = responses.double().flatten()
        return Natural(float(flat.max()), float(flat.mean()), float(flat.std()))


@dataclass(frozen=True)
class Levels:
    trigger: float  # Δ
    rest: float  # δ
    slope: float  # m, the pre-activation's growth with the response

    @staticmethod
    def from_slope(slope: float, response: float, activation: Activation, firing_fraction: float) -> Levels:
        """Levels for a detector whose row has a given size, raised until the trigger is seen at all."""
        rise = (1 - firing_fraction) * response
        slope = (
            max(slope, (_LEAST_TRIGGER_LEVEL - activation.silent_below) / rise) if activation.silent_below else slope
        )
        silent = activation.silent_below
        return Levels(silent + slope * rise, silent - slope * firing_fraction * response, slope)

    @staticmethod
    def from_trigger(level: float, response: float, activation: Activation, firing_fraction: float) -> Levels:
        """Levels for a chosen Δ."""
        if level <= activation.silent_below:
            raise ValueError(f"expected a trigger level above {activation.silent_below}, got {level}")
        slope = (level - activation.silent_below) / ((1 - firing_fraction) * response)
        return Levels(level, activation.silent_below - slope * firing_fraction * response, slope)


def checked_firing_fraction(fraction: float) -> float:
    if not 0 < fraction < 1:
        raise ValueError(f"expected a firing fraction within (0, 1), got {fraction}")
    return float(fraction)
