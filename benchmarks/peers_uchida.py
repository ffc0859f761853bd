"""A watermark embedded by training, implemented from its paper for comparison with stains.

"Embedding Watermarks into Deep Neural Networks" (Uchida, Nagai, Sakazawa, Satoh; ICMR 2017). The kernels of one
convolution are averaged over its filters to w̄; a secret random matrix X reads bit j as the sign of (Xw̄)_j. While the
network is trained on its task, λ times the cross-entropy between σ(Xw̄) and the message is added to its loss.

As in the paper: X is normal (its best choice), 256 bits, SGD with momentum. This is its setting "fine-tune-to-embed":
a trained network is trained further on the owner's images. Left out: training from scratch, distilling while embedding,
and the paper's two other matrices. Rate, steps and λ were chosen here: the paper trains 200 epochs with λ = 0.01; with
few steps at a rate that preserves accuracy, λ must be larger or some bits are not embedded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from stainlock import Target
from stainlock.attacks.paper.fine_tune import trained
from stainlock.numerics import Randomness

MESSAGE = 256
STRENGTH = 0.3  # λ
RATE, STEPS = 5e-3, 200


@dataclass(frozen=True)
class Uchida:
    """The key: the layer, and the seed of matrix and message."""

    layer: str
    size: int  # number of weights of the mean kernel
    seed: int

    @cached_property
    def message(self) -> NDArray[np.uint8]:
        """Drawn at random, so each bit read from a model made without it matches with probability ½."""
        return self._stream("message").integers(0, 2, MESSAGE, dtype=np.uint8)

    @cached_property
    def matrix(self) -> Tensor:
        return torch.from_numpy(self._stream("matrix").standard_normal((MESSAGE, self.size)))

    def read(self, weight: Tensor) -> Tensor:
        """X·w̄: positive for a bit of 1."""
        return self.matrix.to(weight) @ weight.mean(0).flatten()

    def loss(self, weight: Tensor) -> Tensor:
        """The paper's regulariser."""
        wanted = torch.from_numpy(self.message).to(weight)
        return F.binary_cross_entropy_with_logits(self.read(weight), wanted, reduction="sum")

    def extract(self, weights: Mapping[str, Tensor]) -> NDArray[np.uint8]:
        """The message read from a model's weights, which are given by layer."""
        return (self.read(weights[self.layer]) > 0).numpy().astype(np.uint8)

    def _stream(self, purpose: str) -> np.random.Generator:
        return Randomness(self.seed).secret(f"Uchida: {purpose}")


def embed(
    target: Target,
    layer: str,
    images: Tensor,
    labels: Tensor,
    *,
    strength: float = STRENGTH,
    rate: float = RATE,
    steps: int = STEPS,
    seed: int = 0,
) -> tuple[Target, Uchida]:
    """A copy trained further on labelled images and marked in that convolution, and the key to read its message."""
    marked = target.copy()
    weight = marked.model.get_submodule(layer).get_parameter("weight")
    if weight[0].numel() < MESSAGE:
        raise ValueError(f"expected at least {MESSAGE} weights per filter, got {weight[0].numel()} at {layer}")
    mark = Uchida(layer, weight[0].numel(), seed)
    marked.model.requires_grad_(True).train()

    def loss(chosen: Tensor) -> Tensor:
        task = F.cross_entropy(marked.predict(images[chosen]), labels[chosen].to(marked.device))
        return task + strength * mark.loss(weight)

    generator = Randomness(seed).noise("Uchida: training")
    trained(list(marked.model.parameters()), loss, len(images), rate, steps, generator=generator)
    marked.model.eval()
    return marked, mark
