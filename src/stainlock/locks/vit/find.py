"""Recognises the vision transformers that Algorithm 6 can lock; for other models, says what was found instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stainlock.errors import ModelError
from stainlock.locks.vit.model import SATURATED, Block, ViT
from stainlock.target import Target

_WAY_OUT = "expected a pre-norm VisionTransformer of torchvision or timm"
_TORCHVISION = Block(
    "ln_1", "self_attention.in_proj_weight", "self_attention.out_proj", "ln_2", "mlp.0", "mlp.1", "mlp.3"
)
_TIMM = Block("norm1", "attn.qkv.weight", "attn.proj", "norm2", "mlp.fc1", "mlp.act", "mlp.fc2")


def find_vit(target: Target) -> ViT:
    """The target's vision transformer, or an error that says what was found instead."""
    if len(target.input_shape) != 3:
        raise ModelError(f"{_WAY_OUT}, got a model with inputs of shape {target.input_shape}")
    for name, module in target.model.named_modules():
        prefix = f"{name}." if name else ""
        if _is_torchvision(module):
            return _checked(_torchvision(target, module, prefix))
        if _is_timm(module):
            return _checked(_timm(target, module, prefix))
    encoders = [m for m in target.model.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    post_norm = "" if all(m.norm_first for m in encoders) else ", whose blocks are post-norm"
    raise ModelError(f"{_WAY_OUT}, got {type(target.model).__name__}{post_norm}: use another kind of lock")


def _is_torchvision(module: nn.Module) -> bool:
    return _is_a(module, "torchvision.models.vision_transformer.VisionTransformer")


def _is_timm(module: nn.Module) -> bool:
    return _is_a(module, "timm.models.vision_transformer.VisionTransformer")


def _is_a(module: nn.Module, name: str) -> bool:
    """isinstance, without importing a library that is slow to load or may not be there."""
    return name in {f"{c.__module__}.{c.__name__}" for c in type(module).__mro__}


def _torchvision(target: Target, model: Any, prefix: str) -> ViT:
    _check_patches(model.conv_proj)
    for block in model.encoder.layers:
        if not _is_a(block, "torchvision.models.vision_transformer.EncoderBlock"):
            raise ModelError(f"expected blocks of type EncoderBlock, got {type(block).__name__}: {_WAY_OUT}")
    first = model.encoder.layers[0]
    return ViT(
        target, f"{prefix}conv_proj", f"{prefix}encoder.pos_embedding", (f"{prefix}class_token",), 1, False,
        f"{prefix}encoder.layers", "encoder_layer_", _TORCHVISION, first.num_heads, model.hidden_dim,
    )  # fmt: skip


def _timm(target: Target, model: Any, prefix: str) -> ViT:
    from timm.layers.attention import Attention
    from timm.layers.mlp import Mlp
    from timm.layers.patch_embed import PatchEmbed
    from timm.models.vision_transformer import Block as TimmBlock

    embedding, first = model.patch_embed, model.blocks[0]
    if type(embedding) is not PatchEmbed:
        raise ModelError(f"expected a patch embedding of one convolution, got {type(embedding).__name__}: {_WAY_OUT}")
    _check_patches(embedding.proj)
    attention: Any = getattr(first, "attn", None)
    wanted = {
        "blocks of type Block (pre-norm)": type(first) is TimmBlock,
        "no norm between patch embedding and blocks": _absent(embedding.norm) and _absent(model.norm_pre),
        "position embeddings": isinstance(getattr(model, "pos_embed", None), nn.Parameter),
        "every patch to be kept": _absent(model.patch_drop),
        "plain attention": type(attention) is Attention
        and all(_absent(getattr(attention, name, None)) for name in ("q_norm", "k_norm", "norm", "gate")),
        "a plain MLP": type(getattr(first, "mlp", None)) is Mlp and _absent(first.mlp.norm),
    }
    for what, met in wanted.items():
        if not met:
            raise ModelError(f"{type(model).__name__} with {type(first).__name__} can't be locked: expected {what}")
    scales = tuple(f"{name}.gamma" for name in ("ls1", "ls2") if not _absent(getattr(first, name, None)))
    block = Block(**{**vars(_TIMM), "scales": scales})
    constants = [n for n in ("cls_token", "dist_token", "reg_token") if getattr(model, n, None) is not None]
    return ViT(
        target, f"{prefix}patch_embed.proj", f"{prefix}pos_embed", tuple(f"{prefix}{n}" for n in constants),
        int(model.num_prefix_tokens), bool(model.no_embed_class), f"{prefix}blocks", "", block,
        attention.num_heads, attention.num_heads * attention.head_dim,
    )  # fmt: skip


def _absent(module: object) -> bool:
    return module is None or isinstance(module, nn.Identity)


def _check_patches(layer: nn.Module) -> None:
    if not isinstance(layer, nn.Conv2d):
        raise ModelError(f"expected a patch embedding of one convolution, got {type(layer).__name__}: {_WAY_OUT}")
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding == (0, 0)
    if not plain or layer.stride != layer.kernel_size:
        raise ModelError(
            f"expected patches side by side, got a convolution of kernel {layer.kernel_size}, stride {layer.stride},"
            f" padding {layer.padding} and {layer.groups} groups: {_WAY_OUT}"
        )


def _checked(vit: ViT) -> ViT:
    """Refuse models in which the lock's circuit would not work."""
    activation = vit.first_block.get_submodule(vit.block.activation)
    silent, low, high = activation(torch.tensor([-SATURATED, SATURATED - 0.5, SATURATED + 0.5])).tolist()
    if abs(silent) > 1e-6 or abs(high - low - 1) > 1e-5:
        raise ModelError(
            f"expected an MLP whose activation is like GELU, 0 far below and the identity far above, got"
            f" {type(activation).__name__}"
        )
    for name in (vit.block.input_norm, vit.block.output_norm):
        norm = vit.first_block.get_submodule(name)
        if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None:
            raise ModelError(
                f"expected layer norms with weight and bias, got {type(norm).__name__} at {vit.part(0, name)}"
            )
    try:
        vit.stream(torch.full((1, *vit.target.input_shape), sum(vit.target.bounds) / 2))
    except Exception as error:  # whatever the model's own code raises on an input of the wrong size
        given, why = "×".join(map(str, vit.target.input_shape)), " ".join(str(error).split())[:120]
        raise ModelError(
            f"the model does not run on an input of {given} ({why}): set Target(input_shape=...)"
        ) from error
    return vit
