"""Generators of the zoo, a DCGAN of faces and a diffusion model of digits; state dict keys as in the weight files."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class DcganGenerator(nn.Module):
    """Maps noise (100, 1, 1) to a 32×32 face in [−1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.generator_deconv = nn.Sequential(
            nn.Sequential(nn.ConvTranspose2d(100, 256, 4, bias=False), nn.BatchNorm2d(256)),
            nn.Sequential(nn.Conv2d(256, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128), nn.LeakyReLU(0.2)),
            self._upsample(128, 64),
            self._upsample(64, 32),
            nn.Sequential(nn.ConvTranspose2d(32, 3, 4, stride=2, padding=1), nn.Tanh()),
        )

    @staticmethod
    def _upsample(channels_in: int, channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.ConvTranspose2d(channels_in, channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.2),
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator_deconv(noise)  # type: ignore[no-any-return]


class DcganDiscriminator(nn.Module):
    """Maps a 32×32 image in [−1, 1] to one logit: real or generated."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2)),
            self._downsample(32, 64),
            self._downsample(64, 128),
            self._downsample(128, 256),
            nn.Flatten(),
            nn.Linear(1024, 1),
        )

    @staticmethod
    def _downsample(channels_in: int, channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.LeakyReLU(0.2),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.discriminator(image)  # type: ignore[no-any-return]


class TimeEmbedding(nn.Module):
    """Sines and cosines of the timestep."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        half = dimension // 2
        frequencies = torch.exp(torch.arange(half) * (-math.log(10000) / (half - 1)))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, time: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies  # type: ignore[operator]
        return torch.cat([angles.sin(), angles.cos()], dim=1)


class UNetBlock(nn.Module):
    """Two convolutions with the time added between them, then a change of resolution by ``transform``."""

    def __init__(self, channels_in: int, channels: int, transform: nn.Module, time: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.bnorm1 = nn.BatchNorm2d(channels)
        self.time_mlp = nn.Linear(time, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bnorm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.transform = transform

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.bnorm1(self.relu(self.conv1(x)))
        x = x + self.relu(self.time_mlp(time))[:, :, None, None]
        return self.transform(self.bnorm2(self.relu(self.conv2(x))))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Predicts the noise in a 28×28 image at a timestep; one timestep can serve a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(TimeEmbedding(32), nn.Linear(32, 32), nn.ReLU())
        self.conv0 = nn.Conv2d(1, 32, 3, padding=1)
        self.downs = nn.ModuleList(UNetBlock(c // 2, c, nn.Conv2d(c, c, 4, stride=2, padding=1)) for c in (64, 128))
        self.ups = nn.ModuleList(  # inputs have twice the channels, because the skip is concatenated
            UNetBlock(4 * c, c, nn.ConvTranspose2d(c, c, 4, stride=2, padding=1)) for c in (64, 32)
        )
        self.output = nn.Conv2d(32, 1, 1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        time = self.time_mlp(timestep)
        x = self.conv0(x)
        skips = []
        for down in self.downs:
            x = down(x, time)
            skips.append(x)
        for up in self.ups:
            x = up(torch.cat([x, skips.pop()], dim=1), time)
        return self.output(x)  # type: ignore[no-any-return]
