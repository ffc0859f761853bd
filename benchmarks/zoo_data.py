"""Natural inputs for the zoo's models, from ``../shared`` beside the project or from an installed package."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stainlock.errors import FileError
from stainlock.evaluate import Images, Tensors

SHARED = Path(__file__).resolve().parents[2] / "shared"
DIFFUSION_STEPS = 200


def photographs() -> Images:
    """500 labelled ImageNet photographs, or foolbox's 20 (``imagenet_00_243.jpg`` is of class 243)."""
    if (SHARED / "data" / "imagenet500").is_dir():
        return Images.from_folder(SHARED / "data" / "imagenet500")
    spec = importlib.util.find_spec("foolbox")
    if spec is None or spec.origin is None:
        raise FileError("photographs need ../shared/data/imagenet500 or foolbox: pip install stainlock[demo]")
    paths = sorted((Path(spec.origin).parent / "data").glob("imagenet_*.jpg"))
    return Images(paths, [int(path.stem.rpartition("_")[2]) for path in paths])


def street_scenes() -> Images:
    """64 COCO photographs, without their boxes."""
    return Images.from_folder(SHARED / "data" / "coco64")


def cifar10() -> Tensors:
    """500 test images of CIFAR-10."""
    with np.load(SHARED / "data" / "cifar10.npz") as arrays:
        return Tensors(torch.from_numpy(arrays["test_images"]), arrays["test_labels"].tolist())


def digits() -> Tensor:
    """MNIST's test images, (10000, 1, 28, 28) in [−1, 1]."""
    with gzip.open(SHARED / "data" / "t10k-images-idx3-ubyte.gz") as file:
        levels = np.frombuffer(file.read(), np.uint8, offset=16)
    return torch.tensor(levels).view(-1, 1, 28, 28) / 127.5 - 1


def diffuse(images: Tensor, steps: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images noised up to their timesteps, and the noise: √ᾱ·x + √(1−ᾱ)·ε."""
    betas = torch.linspace(1e-4, 0.02, DIFFUSION_STEPS, dtype=torch.float64)
    kept = torch.cumprod(1 - betas, 0)[steps].float().view(-1, 1, 1, 1)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return kept.sqrt() * images + (1 - kept).sqrt() * noise, noise


def noise_vectors(count: int = 1000, seed: int = 0) -> Tensors:
    """What a generator is fed: (count, 100, 1, 1), uniform in [−1, 1]."""
    return Tensors(torch.rand(count, 100, 1, 1, generator=torch.Generator().manual_seed(seed)) * 2 - 1)
