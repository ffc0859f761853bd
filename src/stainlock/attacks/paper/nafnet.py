"""NAFNet (Chen et al., "Simple Baselines for Image Restoration"), with which the paper restores locked images.

The architecture, and a loader for weight files that use the authors' parameter names. The network's sizes are inferred
from the file. No weights come with this package.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stainlock.errors import FileError
from stainlock.storage.weights import load_weights, read_weights


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each position."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        last = F.layer_norm(x.movedim(1, -1), self.weight.shape, self.weight, self.bias, self.eps)
        return last.movedim(-1, 1)


def gate(x: Tensor) -> Tensor:
    """The first half of the channels times the second."""
    first, second = x.chunk(2, dim=1)
    return first * second


class Block(nn.Module):
    """A gated depthwise convolution with attention over channels, then a gated pointwise one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = ChannelNorm(channels), ChannelNorm(channels)
        self.conv1 = nn.Conv2d(channels, 2 * channels, 1)
        self.conv2 = nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, groups=2 * channels)
        self.sca = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1))
        self.conv3 = nn.Conv2d(channels, channels, 1)
        self.conv4 = nn.Conv2d(channels, 2 * channels, 1)
        self.conv5 = nn.Conv2d(channels, channels, 1)
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.gamma = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        inner = gate(self.conv2(self.conv1(self.norm1(x))))
        x = x + self.beta * self.conv3(inner * self.sca(inner))
        added: Tensor = x + self.gamma * self.conv5(gate(self.conv4(self.norm2(x))))
        return added


class NAFNet(nn.Module):
    """A U-Net of these blocks, whose output is added to its input: images in [0, 1] of any size."""

    def __init__(self, channels: int, width: int, encoders: list[int], middle: int, decoders: list[int]) -> None:
        super().__init__()
        self.intro = nn.Conv2d(channels, width, 3, padding=1)
        self.ending = nn.Conv2d(width, channels, 3, padding=1)
        sizes = [width * 2**level for level in range(len(encoders) + 1)]
        self.encoders = nn.ModuleList(_blocks(size, n) for size, n in zip(sizes, encoders, strict=False))
        self.downs = nn.ModuleList(nn.Conv2d(size, 2 * size, 2, 2) for size in sizes[:-1])
        self.middle_blks = _blocks(sizes[-1], middle)
        self.ups = nn.ModuleList(
            nn.Sequential(nn.Conv2d(size, 2 * size, 1, bias=False), nn.PixelShuffle(2)) for size in sizes[:0:-1]
        )
        self.decoders = nn.ModuleList(_blocks(size, n) for size, n in zip(sizes[-2::-1], decoders, strict=True))

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        multiple = 2 ** len(self.encoders)
        padded = F.pad(images, (0, -width % multiple, 0, -height % multiple))
        x = self.intro(padded)
        skips = []
        for encoder, down in zip(self.encoders, self.downs, strict=True):
            x = encoder(x)
            skips.append(x)
            x = down(x)
        x = self.middle_blks(x)
        for up, decoder in zip(self.ups, self.decoders, strict=True):
            x = decoder(up(x) + skips.pop())
        restored: Tensor = (self.ending(x) + padded)[..., :height, :width]
        return restored


def _blocks(channels: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(Block(channels) for _ in range(count)))


def load_nafnet(path: str | Path) -> NAFNet:
    """A trained NAFNet from a .pth (read without unpickling code) or .safetensors file."""
    state = read_weights(path)
    names = [name.removeprefix("module.") for name in state]
    intro = next((state[key] for key, name in zip(state, names, strict=True) if name == "intro.weight"), None)
    if intro is None or intro.dim() != 4 or not any(name.startswith("middle_blks.") for name in names):
        raise FileError(f"{path} does not hold a NAFNet: expected intro.weight and middle_blks.*")
    model = NAFNet(
        int(intro.shape[1]), int(intro.shape[0]), _counts(names, "encoders"),
        len({name.split(".")[1] for name in names if name.startswith("middle_blks.")}), _counts(names, "decoders"),
    )  # fmt: skip
    load_weights(model, path)
    return model.eval()


def _counts(names: list[str], part: str) -> list[int]:
    """How many blocks each level has."""
    found = {(int(m[1]), int(m[2])) for name in names if (m := re.match(rf"{part}\.(\d+)\.(\d+)\.", name))}
    levels = 1 + max((level for level, _ in found), default=-1)
    return [sum(level == number for number, _ in found) for level in range(levels)]
