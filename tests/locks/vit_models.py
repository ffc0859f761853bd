"""Small vision transformers of every structure that can be locked, and a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from stainlock import Target

REAL = "vit_cifar10_torchvision"
SIZES = {"num_layers": 3, "num_heads": 4, "hidden_dim": 48, "mlp_dim": 96, "num_classes": 10}


def torchvision_vit(**options: Any) -> Target:
    def build() -> nn.Module:
        return VisionTransformer(**{"image_size": 32, "patch_size": 8, **SIZES, **options})

    return lively(models.seeded(build))


def timm_vit(**options: Any) -> Target:
    layout = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4, "num_classes": 10}
    transformer = pytest.importorskip("timm.models.vision_transformer")
    return lively(models.seeded(lambda: transformer.VisionTransformer(**{**layout, **options})))


def lively(model: nn.Module) -> Target:
    """What a fresh model leaves at 0, 1 or next to it gets values, as after training."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1 or "token" in name or "pos_embed" in name:
            parameter.data += 0.2 * noise
        elif name.startswith("head"):
            parameter.data += noise
    return Target(model, (3, 32, 32), **models.UNIT)


MODELS: dict[str, Callable[[], Target]] = {
    "torchvision": torchvision_vit,
    "timm": timm_vit,
    "registers": lambda: timm_vit(reg_tokens=3, no_embed_class=True),
    "no class token": lambda: timm_vit(class_token=False, global_pool="avg"),
    "no biases": lambda: timm_vit(qkv_bias=False, proj_bias=False),
    "layer scale": lambda: timm_vit(init_values=0.1),
    "quick gelu": lambda: timm_vit(act_layer="quick_gelu"),
    "inside another": lambda: Target(
        nn.Sequential(nn.Identity(), torchvision_vit().model).eval(), (3, 32, 32), **models.UNIT
    ),
    REAL: lambda: models.real(REAL),
}
