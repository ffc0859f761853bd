"""The tiny models of the golden files in tests/golden, each a factory without arguments that returns a `Target`.

They are never changed: files of released versions were made with them. Their weights are read from those files, because
what a seed draws, and how a library initialises, differs between versions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from stainlock import Target


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 32)
        self.second = nn.Linear(32, 76)
        self.head = nn.Linear(76, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(torch.flatten(x, 1)))
        return self.head(torch.relu(self.second(x)))


def perceptron() -> Target:
    return Target(Perceptron().eval(), (3, 4, 4), mean=(0.5,), std=(0.25,))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths, layers = (3, 12, 12, 12, 16), []
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.features = nn.Sequential(*layers[:6], nn.MaxPool2d(2), *layers[6:])
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(self.features(x)), 1))


def convolutional() -> Target:
    return Target(Convolutional().eval(), (3, 24, 24), mean=(0.5, 0.45, 0.4), std=(0.25,))


def transformer() -> Target:
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 24, "num_classes": 10}
    model = VisionTransformer(image_size=24, patch_size=8, **sizes)
    return Target(model.eval(), (3, 24, 24), mean=(0.5,), std=(0.25,))


def generator() -> Target:
    model = nn.Sequential(
        nn.ConvTranspose2d(12, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 3, 3, padding=1), nn.Tanh(),
    )  # fmt: skip
    return Target(model.eval(), (12, 1, 1), mean=(0,), std=(1,), bounds=(-1, 1))
