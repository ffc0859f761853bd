"""A small classifier in a factory file, a small generator beside it, and a folder of labelled pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

FACTORIES = """
import torch
from torch import nn
import stainlock as sl

def model():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )
    return sl.Target(layers, input_shape=(3, 32, 32))

def generator():
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.ConvTranspose2d(32, 64, 4, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
    )
    return sl.Target(layers, input_shape=(32, 1, 1), mean=(0,), std=(1,), bounds=(-1, 1))

def vit():
    from torchvision.models import VisionTransformer
    torch.manual_seed(0)
    layers = VisionTransformer(32, 8, 3, 4, 64, 128, num_classes=10)
    nn.init.normal_(layers.heads.head.weight, std=0.5)  # torchvision starts with zeros
    return sl.Target(layers, input_shape=(3, 32, 32))

def inputs():
    return torch.rand(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))

def number():
    return 7
"""


def write_models(folder: Path) -> Path:
    """``small.py`` with the factories, and ``photos``."""
    (folder / "small.py").write_text(FACTORIES)
    (folder / "photos").mkdir()
    noise = np.random.default_rng(0)
    for index in range(12):
        Image.fromarray(noise.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / "photos" / f"{index:02}.png")
    lines = "".join(f"{index:02}.png,{index % 10}\n" for index in range(12))
    (folder / "photos" / "labels.csv").write_text("file,class_index\n" + lines)
    return folder
