"""The denoising attack on a locked generator: restore its images as if they were noisy photographs.

Three methods, none of which uses knowledge of the lock:

- ``nl-means``: non-local means (Buades, Coll and Morel), implemented here. Each pixel becomes the weighted mean of its
  neighbourhood, w = exp(−max(D − 2σ², 0)/h²), where D is the mean square difference of the surrounding patches;
- ``bm3d``: block matching and 3D filtering (Dabov et al.), with the authors' package ``bm3d``. Its licence is
  non-commercial, so it is not installed automatically;
- ``nafnet``: the paper's method, a trained network (`nafnet`). You supply the weights.

The strength to sweep is σ, the noise level assumed by the method, for pixels in [0, 1].
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from stainlock.attacks.paper.nafnet import load_nafnet
from stainlock.errors import FileError

Method = Literal["nl-means", "bm3d", "nafnet"]
METHODS = ("nl-means", "bm3d", "nafnet")


def denoise(
    images: Tensor,
    method: Method = "nl-means",
    *,
    sigma: float = 0.2,
    bounds: tuple[float, float] = (-1.0, 1.0),
    weights: str | Path | None = None,
) -> Tensor:
    """Restores images ``(N, C, H, W)`` within ``bounds``; ``weights`` is NAFNet's file."""
    if method not in METHODS:
        raise ValueError(f"expected one of {', '.join(METHODS)} as method, got {method!r}")
    if not sigma > 0:
        raise ValueError(f"expected sigma above 0, got {sigma}")
    if images.dim() != 4:
        raise ValueError(f"expected images (N, C, H, W), got {tuple(images.shape)}")
    low, high = bounds
    unit = (images.detach().cpu().double() - low) / (high - low)
    if method == "nl-means":
        restored = non_local_means(unit, sigma)
    elif method == "bm3d":
        restored = _bm3d(unit, sigma)
    else:
        if weights is None:
            raise ValueError("expected weights=FILE for nafnet: they are not part of this package")
        with torch.inference_mode():
            restored = load_nafnet(weights)(unit.float()).double()
    return (low + (high - low) * restored.clamp(0, 1)).to(images.dtype)


def non_local_means(images: Tensor, sigma: float, *, patch: int = 5, reach: int = 7, filtering: float = 0.6) -> Tensor:
    """The pixelwise method for images in [0, 1], over a neighbourhood of (2·reach + 1)² pixels; h = 0.6σ."""
    height, width = images.shape[-2:]
    reach = min(reach, height - 1, width - 1)
    half = patch // 2
    around = F.pad(images, (reach,) * 4, mode="reflect")
    total, weight = torch.zeros_like(images), torch.zeros_like(images[:, :1])
    for row in range(2 * reach + 1):
        for column in range(2 * reach + 1):
            moved = around[..., row : row + height, column : column + width]
            apart = (moved - images).square().mean(1, keepdim=True)
            distance = F.avg_pool2d(F.pad(apart, (half,) * 4, mode="replicate"), patch, 1)
            w = torch.exp(-(distance - 2 * sigma**2).clamp(min=0) / (filtering * sigma) ** 2)
            total += w * moved
            weight += w
    return total / weight


def _bm3d(images: Tensor, sigma: float) -> Tensor:
    try:
        package = importlib.import_module("bm3d")
    except ImportError as error:
        raise FileError("BM3D needs its authors' package (non-commercial): pip install bm3d") from error
    run = package.bm3d_rgb if images.shape[1] == 3 else package.bm3d
    restored = []
    for image in images:
        found = run(image.permute(1, 2, 0).numpy(), sigma)
        restored.append(torch.from_numpy(found).reshape(*image.shape[1:], -1).permute(2, 0, 1))
    return torch.stack(restored)
