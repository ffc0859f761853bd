"""The residual stream of a pre-norm vision transformer rotated at random: the same function in other weights.

Layer norms are first folded into their readers, so they only centre and scale. With Q orthogonal and Q·1 = 1,

    LN(Q x) = Q LN(x)          writers W → Q W,  b → Q b          readers W → W Qᵀ

No channel of the stream equals any channel from before. ``rotate-and-permute`` also permutes the hidden units of every
perceptron, so neither the rows nor the columns of its layers keep their places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.changes import edited


def rotation(width: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix that maps the vector of ones to itself."""
    ones = torch.ones(width, 1, dtype=torch.float64) / width**0.5
    basis = torch.linalg.qr(torch.cat([ones, torch.eye(width, dtype=torch.float64)[:, 1:]], 1)).Q
    turn = torch.linalg.qr(torch.randn(width - 1, width - 1, generator=generator, dtype=torch.float64)).Q
    turned: Tensor = basis @ torch.block_diag(torch.ones(1, 1, dtype=torch.float64), turn) @ basis.T
    return turned


def _fold(norm: nn.LayerNorm, weight: Tensor, bias: Tensor) -> None:
    """Folds γ and β of a layer norm into the layer that reads it."""
    bias.add_(weight @ norm.bias)
    weight.mul_(norm.weight)


def _turn(model: Any, generator: torch.Generator, permute: bool) -> None:
    q = rotation(model.hidden_dim, generator).float()
    kernel = model.conv_proj.weight
    kernel.copy_((q @ kernel.flatten(1)).view_as(kernel))
    model.conv_proj.bias.copy_(q @ model.conv_proj.bias)
    for token in (model.class_token, model.encoder.pos_embedding):
        token.copy_(token @ q.T)
    for block in model.encoder.layers:
        attention, first, second = block.self_attention, block.mlp[0], block.mlp[3]
        readers = (
            (block.ln_1, attention.in_proj_weight, attention.in_proj_bias),
            (block.ln_2, first.weight, first.bias),
        )
        for norm, weight, bias in readers:
            _fold(norm, weight, bias)
            weight.copy_(weight @ q.T)
        for writer in (attention.out_proj, second):
            writer.weight.copy_(q @ writer.weight)
            writer.bias.copy_(q @ writer.bias)
        if permute:
            order = torch.randperm(first.out_features, generator=generator)
            first.weight.copy_(first.weight[order])
            first.bias.copy_(first.bias[order])
            second.weight.copy_(second.weight[:, order])
    head = model.heads.head
    _fold(model.encoder.ln, head.weight, head.bias)
    head.weight.copy_(head.weight @ q.T)
    for norm in [m for m in model.modules() if isinstance(m, nn.LayerNorm)]:
        norm.weight.fill_(1.0)
        norm.bias.zero_()


def _run(subject: Subject, strength: Strength) -> Attacked:
    if type(subject.target.model).__name__ != "VisionTransformer" or not hasattr(subject.target.model, "conv_proj"):
        raise NotApplicable("works only on torchvision's vision transformers")
    generator = subject.randomness.noise(f"rotation {strength}")
    return Attacked(edited(subject.target, lambda model: _turn(model, generator, strength == "rotate-and-permute")))


ATTACK = Attack(
    "rotate-residual", "thief", ("stain",), "nothing", ("rotate", "rotate-and-permute"), _run,
    "rotate the residual stream of a vision transformer at random",
)  # fmt: skip
