"""Which channel of a transformer's tokens to give up, and what a layer norm sees of a channel."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.locks.vit.model import ViT
from stainlock.numerics import exact
from stainlock.target import evaluation_mode

# Number of cheapest channels that are tried, and number of inputs to try them on.
_CANDIDATES, _TRIALS = 8, 4


def others_mean(values: Tensor, k: int, axis: int = -1) -> Tensor:
    """The mean of all channels except k."""
    mean: Tensor = (values.sum(axis) - values.select(axis, k)) / (values.shape[axis] - 1)
    return mean


def silenced(stream: Tensor, k: int, shift: float = 0.0) -> Tensor:
    """Tokens whose channel k carries nothing: it is the mean of the others, plus a constant ``shift``."""
    result = stream.clone()
    result[..., k] = others_mean(stream, k) + shift
    return result


def spread(stream: Tensor, epsilon: float) -> Tensor:
    """σ of each token, as a layer norm computes it."""
    return (stream.var(-1, unbiased=False) + epsilon).sqrt()


def epsilon_of(vit: ViT) -> float:
    return float(getattr(vit.first_block.get_submodule(vit.block.input_norm), "eps", 0.0))


def usual_level(stream: Tensor, k: int) -> float:
    """How far channel k is from the mean of the others, on average over images and tokens."""
    return float((stream[..., k] - others_mean(stream, k)).mean())


def quietest_kernel(vit: ViT) -> int:
    """The paper's choice: the kernel with the smallest ℓ1 norm."""
    return int(exact(vit.convolution, "weight").flatten(1).abs().sum(1).argmin())


def choose_channel(vit: ViT, probes: Tensor) -> int:
    """The channel whose loss changes the output least, among those that vary least and are read with small weights."""
    stream, trials = vit.stream(probes), probes[:_TRIALS]
    mean = (stream.sum(-1, keepdim=True) - stream) / (vit.width - 1)
    deviation = (stream - mean).flatten(0, 1).std(0)
    cost = deviation * _readers(vit).sqrt()
    candidates = cost.argsort()[:_CANDIDATES].tolist()
    with evaluation_mode(vit.target.model), torch.no_grad():
        plain = vit.target.predict(trials)
        changes: dict[int, float] = {}
        for k in candidates:
            level = usual_level(stream, k)
            with vit.with_stream(lambda tokens, k=k, level=level: silenced(tokens, k, level)):  # type: ignore[misc]
                changes[k] = float((vit.target.predict(trials) - plain).norm())
    return min(changes, key=lambda k: changes[k])


def _readers(vit: ViT) -> Tensor:
    """For each channel, the sum of the squared weights with which all blocks read it."""
    total = torch.zeros(vit.width, dtype=torch.float64)
    for index in range(len(vit.target.model.get_submodule(vit.blocks)._modules)):
        for norm, weight in (
            (vit.block.input_norm, vit.block.qkv_weight),
            (vit.block.output_norm, f"{vit.block.hidden}.weight"),
        ):
            gains = exact(vit.target.model.get_submodule(vit.part(index, norm)), "weight")
            columns = vit.target.model.get_parameter(vit.part(index, weight)).detach().double().cpu()
            total += gains.square() * columns.square().sum(0)
    return total
