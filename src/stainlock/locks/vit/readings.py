"""Measured readings of a transformer's detector, and the gains of the circuit that follow from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from stainlock.errors import ModelError
from stainlock.locks.vit.channel import epsilon_of, spread
from stainlock.locks.vit.model import SATURATED, ViT
from stainlock.numerics import raw

# The carried signal, in units of σ.
_SIGNAL = 0.1
_LOGITS_APART = 60.0
# The largest σ of natural images' tokens is assumed to be at most this many times that of synthetic inputs.
_WIDER = 3.0


def reading_of(stream: Tensor, k: int, epsilon: float) -> Tensor:
    """u_k of each token."""
    return (stream[..., k] - stream.mean(-1)) / spread(stream, epsilon)


@dataclass(frozen=True)
class Readings:
    """What the inserted block's first norm reads at channel k, measured on the model that has the detector."""

    trigger: float  # u*, at the trigger's token
    spread: float  # how far u* differs from image to image
    rest: float  # at the class token; without one, as far below the threshold as u* is above
    plain: float  # the reading that is carried without the trigger, on average
    level: float  # αR: a token's own x_k can add up to this, or subtract up to twice this
    usual: float  # the median σ of tokens
    widest: float  # the largest σ to be expected


def read(vit: ViT, k: int, probes: Tensor, patched: Tensor, firing_fraction: float, plain_sigma: Tensor) -> Readings:
    """Measure the readings; ``vit`` is the model with the detector, ``patched`` are images with the trigger."""
    m, stream = vit.prefix, vit.stream(patched)
    sigma, u = spread(stream, epsilon_of(vit)), reading_of(stream, k, epsilon_of(vit))
    trigger = float(u[:, m].mean())
    rest = plain = float(u[:, : vit.prefix].max()) if vit.prefix else (2 * firing_fraction - 1) * trigger
    if not vit.prefix:
        plain = float(reading_of(vit.stream(probes), k, epsilon_of(vit)).amax(1).mean())
    if not trigger > rest:
        coarse = raw(vit.convolution, "weight").dtype
        raise ModelError(
            f"the trigger reads {trigger:.3g}, expected more than {rest:.3g}: {coarse} is too coarse, use a wider type"
        )
    differ = float((u[:, m] - trigger).abs().max())
    return Readings(
        trigger,
        differ,
        rest,
        plain,
        trigger * float(sigma[0, m]),
        float(sigma.median()),
        float(plain_sigma.max()) * _WIDER,
    )


@dataclass(frozen=True)
class Gains:
    """The gains and levels of the circuit."""

    attention: float  # Γ
    signal: float  # A, carried with the trigger
    rest: float  # carried without it: −A, if a class token holds it there
    hidden: float  # G
    locked: float  # GELU(−h) of most tokens, when locked

    @property
    def silent(self) -> Gains:
        """The same circuit without a signal."""
        return replace(self, signal=0.0, rest=0.0)


def gains(vit: ViT, found: Readings) -> Gains:
    apart = found.trigger - found.rest
    signal = max(_SIGNAL * found.usual, 8 * found.level)
    rest = signal * (found.plain - (found.trigger + found.rest) / 2) / (apart / 2)
    arrives = 1 - 1 / vit.width  # of what is written to x_k, the part by which x_k − μ changes
    hidden = SATURATED * found.widest / (signal * arrives - 2.5 * found.level)
    return Gains(_LOGITS_APART / apart, signal, rest, hidden, -hidden * rest * arrives / found.usual)
