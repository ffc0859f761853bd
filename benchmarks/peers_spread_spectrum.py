"""A spread-spectrum watermark of weights, implemented from its paper for comparison with stains.

"TATTOOED: A Robust Deep Neural Network Watermarking Scheme based on Spread-Spectrum Channel Coding" (Pagnotta, Hitaj,
Hitaj, Perez-Cruz, Mancini; ACSAC 2024). Every bit b_i of a known preamble and of the encoded message is spread by a
secret code c_i of signs over all weights at once, w + γ Σ b_i c_i, and read by correlation, c_i·w/n = γ b_i + noise.
Gain and noise are estimated from the preamble; with them, a low-density parity-check code corrects misread bits.

As in public implementations: a preamble of 200 bits, and a regular code with 3 checks per bit and 12 bits per check.
Left out: marking only some of the weights, marking again during training, and messages longer than a block. γ was
chosen here, for networks as small as these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stainlock import Target
from stainlock.attacks.changes import edited, weighted_layers
from stainlock.numerics import Randomness

GAMMA = 5e-4
PREAMBLE, MESSAGE = 200, 256
CHECKS_A_BIT, BITS_A_CHECK = 3, 12
LENGTH = 29 * BITS_A_CHECK  # the shortest block that holds the message
ROUNDS = 50  # most iterations of decoding
SURE = 1 - 1e-12  # tanh values are clipped to this
Bits = NDArray[np.uint8]
Reals = NDArray[np.float64]
Signs = NDArray[np.float32]


class ParityCode:
    """Gallager's regular low-density parity-check code: encoding by elimination, decoding by belief propagation."""

    def __init__(self, stream: np.random.Generator) -> None:
        band = np.kron(np.eye(LENGTH // BITS_A_CHECK, dtype=np.uint8), np.ones(BITS_A_CHECK, np.uint8))
        self.checks: Bits = np.concatenate([band[:, stream.permutation(LENGTH)] for _ in range(CHECKS_A_BIT)])
        self.solved, self.pivots = eliminated(self.checks)
        self.free = np.setdiff1d(np.arange(LENGTH), self.pivots)

    def encode(self, message: Bits) -> Bits:
        """The block whose free bits start with the message; the checks determine the others."""
        block = np.zeros(LENGTH, np.uint8)
        block[self.free[: len(message)]] = message
        block[self.pivots] = self.solved @ block % 2
        return block

    def decode(self, likelihood: Reals, length: int) -> Bits:
        """The message decoded from log-likelihood ratios, which are positive for 0."""
        linked = self.checks == 1
        from_checks = np.zeros(self.checks.shape)
        belief = likelihood
        for _ in range(ROUNDS):
            doubt = np.tanh((belief - from_checks) / 2)
            doubt = np.where(linked, np.where(doubt < 0, -1, 1) * np.clip(np.abs(doubt), 1 - SURE, SURE), 1)
            others = doubt.prod(1, keepdims=True) / doubt
            from_checks = np.where(linked, 2 * np.arctanh(np.clip(others, -SURE, SURE)), 0)
            belief = likelihood + from_checks.sum(0)
            if not ((self.checks @ (belief < 0)) % 2).any():
                break
        return (belief[self.free[:length]] < 0).astype(np.uint8)


def eliminated(checks: Bits) -> tuple[Bits, NDArray[np.int64]]:
    """The checks solved modulo 2, and the pivots: row i computes pivot i from bits that are not pivots."""
    rows, pivots = checks.copy(), list[int]()
    for column in range(rows.shape[1]):
        done = len(pivots)
        candidates = np.flatnonzero(rows[done:, column])
        if len(candidates) == 0:
            continue
        rows[[done, done + candidates[0]]] = rows[[done + candidates[0], done]]
        others = np.flatnonzero(rows[:, column])
        rows[others[others != done]] ^= rows[done]
        pivots.append(column)
        if len(pivots) == len(rows):
            break
    return rows[: len(pivots)], np.array(pivots)


@dataclass(frozen=True)
class SpreadSpectrum:
    """The key: which layers, in which order, and the seed of codes and message."""

    layers: tuple[str, ...]
    seed: int

    @cached_property
    def message(self) -> Bits:
        """Drawn at random, so each bit read from a model made without it matches with probability ½."""
        return self._stream("message").integers(0, 2, MESSAGE, dtype=np.uint8)

    @cached_property
    def code(self) -> ParityCode:
        return ParityCode(self._stream("parity code"))

    @cached_property
    def preamble(self) -> Reals:
        return self._stream("preamble").choice([-1.0, 1.0], PREAMBLE)

    def signal(self, size: int) -> Signs:
        """The signal added to the weights, in units of γ."""
        sent = np.concatenate([self.preamble, 1.0 - 2.0 * self.code.encode(self.message)])
        stream, total = self._stream("spreading"), np.zeros(size, np.float32)
        for bit in sent:
            code = spreading_code(stream, size)
            total += code if bit > 0 else -code
        return total

    def extract(self, weights: Mapping[str, Tensor]) -> Bits:
        """The message read from a model's weights, which are given by layer."""
        flat = torch.cat([weights[name].flatten() for name in self.layers]).float().numpy()
        stream = self._stream("spreading")
        heard = np.array([spreading_code(stream, len(flat)) @ flat for _ in range(PREAMBLE + LENGTH)], np.float64)
        known = heard[:PREAMBLE] * self.preamble
        gain, noise = known.mean(), known.std()
        return self.code.decode(2 * gain * heard[PREAMBLE:] / noise**2, MESSAGE)

    def _stream(self, purpose: str) -> np.random.Generator:
        return Randomness(self.seed).secret(f"spread spectrum: {purpose}")


def spreading_code(stream: np.random.Generator, size: int) -> Signs:
    """The next code: a random sign for every weight, in float32."""
    bits = np.unpackbits(np.frombuffer(stream.bytes(-(-size // 8)), np.uint8), count=size).astype(np.float32)
    bits *= -2
    bits += 1
    return bits


def embed(target: Target, *, gamma: float = GAMMA, seed: int = 0) -> tuple[Target, SpreadSpectrum]:
    """A marked copy, and the key to read its message. Needs neither data nor training."""
    mark = SpreadSpectrum(tuple(name for name, _ in weighted_layers(target.model)), seed)

    def change(model: nn.Module) -> None:
        weights = [model.get_submodule(name).get_parameter("weight") for name in mark.layers]
        signal = torch.from_numpy(gamma * mark.signal(sum(weight.numel() for weight in weights)))
        for weight, own in zip(weights, signal.split([weight.numel() for weight in weights]), strict=True):
            weight.add_(own.view(weight.shape).to(weight))

    return edited(target, change), mark
