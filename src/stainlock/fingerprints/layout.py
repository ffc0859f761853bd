"""Which weights carry a fingerprint, and how strongly.

Every parameter with two axes or more and at least 1024 weights carries: convolutions, linear layers, embeddings.
Biases and norms are left alone: they are few, and a model is much more sensitive to each of them. In row r of a tensor
(its first axis) the mark's standard deviation is

    a_t · scale_r,    scale_r = √(mean of the row's squared weights), rounded to 8 significant bits

so every row changes by the same fraction of its size, and a dead row is not marked. The rounding makes the scale, and
with it every bit of an issued file, the same on machines that sum in another order.

Models are sensitive to small tensors: as a rule, the same relative change of a whole tensor does the same harm however
many weights it has. So a tensor's amplitude grows with the square root of its size n_t,

    a_t = a · √(n_t / n̂),    n̂ = Σ n_t² / Σ n_t,

which keeps the mean of a_t² over all weights at a²: scores stay the same, and the harm is a fraction of what it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from stainlock.errors import ModelError
from stainlock.fingerprints.streams import check_secret

CHIPS = 16384
AMPLITUDE = 0.01
PAGE = 1024  # weights per page, and chips per page: every weight of a page carries all of its chips
_LEAST = 1024  # weights that a tensor needs to carry a mark
_BITS = 8
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Layout:
    """The settings for one model: its secret, the number of chips m, the amplitude a and the tensors that carry.

    ``shapes`` has the shape of every tensor that carries, by name.
    """

    secret: bytes = field(repr=False)
    shapes: Mapping[str, tuple[int, ...]]
    chips: int = CHIPS
    amplitude: float = AMPLITUDE

    def __post_init__(self) -> None:
        check_secret(self.secret, "the model's")
        if self.chips < PAGE or self.chips % PAGE:
            raise ValueError(f"expected a multiple of {PAGE} as chips, got {self.chips}")
        if not 0 < self.amplitude < 1:
            raise ValueError(f"expected an amplitude between 0 and 1, got {self.amplitude}")
        if not self.shapes:
            raise ModelError(f"no parameter has two axes and {_LEAST} weights: this model can't carry a fingerprint")

    @staticmethod
    def of(
        base: nn.Module | Mapping[str, Tensor], secret: bytes, *, chips: int = CHIPS, amplitude: float = AMPLITUDE
    ) -> Layout:
        """The layout for a base model, or for its weights by name."""
        shapes = {name: tuple(tensor.shape) for name, tensor in carriers(base).items()}
        return Layout(secret, shapes, chips, amplitude)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of weights in each tensor that carries."""
        return {name: math.prod(shape) for name, shape in self.shapes.items()}

    @property
    def weights(self) -> int:
        """Number of weights that carry, in all tensors."""
        return sum(self.sizes.values())

    def amplitude_of(self, name: str) -> float:
        """a_t of a tensor."""
        return self.amplitude * math.sqrt(self.sizes[name] * self.weights / sum(n * n for n in self.sizes.values()))


def carriers(base: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that carry, by name. A tensor with several names is listed under the first."""
    named = dict(base.named_parameters()) if isinstance(base, nn.Module) else base
    found, seen = {}, set()
    for name, tensor in named.items():
        carries = tensor.dim() >= 2 and tensor.numel() >= _LEAST and tensor.dtype in _TYPES
        place = (tensor.data_ptr(), tensor.shape)
        if carries and place not in seen:
            seen.add(place)
            found[name] = tensor.detach()
    return found


def row_scales(tensor: Tensor) -> Tensor:
    """scale_r for every row, in float64: ``(rows,)``."""
    rows = tensor.detach().cpu().flatten(1)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    mantissa, exponent = torch.frexp(norms / rows.shape[1] ** 0.5)
    scales = torch.ldexp((mantissa * 2**_BITS).round() / 2**_BITS, exponent)
    return torch.nan_to_num(scales, nan=0.0, posinf=0.0, neginf=0.0)
