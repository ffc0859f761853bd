"""Classifiers of the zoo that are in no library; their state dict keys are those of the weight files."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.vgg import cfgs, make_layers


class CifarBlock(nn.Module):
    """ResNet's basic block; if the width doubles, the shortcut keeps every other pixel and pads with zero channels."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.stride = channels // channels_in
        self.conv1 = nn.Conv2d(channels_in, channels, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.stride == 2:
            quarter = self.conv1.out_channels // 4
            shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, quarter, quarter))
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + shortcut)  # type: ignore[no-any-return]


class CifarResNet(nn.Module):
    """He et al.'s ResNet for 32×32 images, of 6·blocks + 2 layers."""

    def __init__(self, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = self._layer(16, 16, blocks)
        self.layer2 = self._layer(16, 32, blocks)
        self.layer3 = self._layer(32, 64, blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, classes)

    @staticmethod
    def _layer(channels_in: int, channels: int, blocks: int) -> nn.Sequential:
        return nn.Sequential(
            CifarBlock(channels_in, channels), *(CifarBlock(channels, channels) for _ in range(blocks - 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]


class CifarVgg16(nn.Module):
    """torchvision's VGG16 for 32×32 images: pooled to one position, with 512 hidden units instead of 4096."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = make_layers(cfgs["D"], batch_norm=False)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Sequential(
            *(nn.Linear(512, 512), nn.ReLU(), nn.Dropout()),
            *(nn.Linear(512, 512), nn.ReLU(), nn.Dropout()),
            nn.Linear(512, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.avgpool(self.features(x)), 1)
        return self.classifier(x)  # type: ignore[no-any-return]


class PatchEmbedding(nn.Module):
    """Patches to tokens."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.proj(x), 2).transpose(1, 2)


class PostNormLayer(nn.Module):
    """`nn.TransformerEncoderLayer` with its defaults (ReLU, norm after each sum), but traceable."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.linear1 = nn.Linear(width, hidden)
        self.relu = nn.ReLU()
        self.linear2 = nn.Linear(hidden, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.self_attn(x, x, x, need_weights=False)
        x = self.norm1(x + attended)
        return self.norm2(x + self.linear2(self.relu(self.linear1(x))))  # type: ignore[no-any-return]


class PostNormTransformer(nn.Module):
    """A stack of post-norm layers."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PostNormLayer(width, heads, hidden) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class PostNormViT(nn.Module):
    """A vision transformer for 32×32 images with norms after each sum; the head reads the class token."""

    def __init__(self, width: int = 128, classes: int = 10) -> None:
        super().__init__()
        self.patch_embed = PatchEmbedding(4, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + 8 * 8, width))
        self.transformer = PostNormTransformer(layers=6, width=width, heads=8, hidden=2 * width)
        self.mlp_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.pos_embed
        return self.mlp_head(self.transformer(tokens)[:, 0])  # type: ignore[no-any-return]


class PaddedConv2d(nn.Conv2d):
    """A convolution that can pad its input by different amounts before and after."""

    def __init__(self, like: nn.Conv2d, before: int, after: int) -> None:
        shape = (like.in_channels, like.out_channels, like.kernel_size, like.stride)
        super().__init__(*shape, groups=like.groups, bias=like.bias is not None)  # type: ignore[arg-type]
        self.load_state_dict(like.state_dict())
        self.pads = (before, after, before, after)

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(F.pad(x, self.pads), self.weight, self.bias)  # type: ignore[no-any-return]


def pad_like_tensorflow(model: nn.Module, image: Tensor) -> None:
    """Give the strided convolutions TensorFlow's SAME padding for images of this size."""
    strided = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    sizes: dict[nn.Module, int] = {}
    hooks = [m.register_forward_pre_hook(lambda m, x: sizes.update({m: x[0].shape[-1]})) for _, m in strided]
    with torch.no_grad():
        model(image)
    for hook in hooks:
        hook.remove()
    for name, convolution in strided:
        size, kernel = sizes[convolution], convolution.kernel_size[0]
        padding = (math.ceil(size / 2) - 1) * 2 + kernel - size
        parent, _, child = name.rpartition(".")
        padded = PaddedConv2d(convolution, padding // 2, padding - padding // 2)
        setattr(model.get_submodule(parent), child, padded.train(convolution.training))
