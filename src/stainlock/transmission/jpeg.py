"""Differentiable JPEG: the standard's steps in order, with rounding whose gradient is 1.

    RGB → Y, Cb, Cr;  colours averaged over 2×2 pixels;  blocks of 8×8;  F = D B Dᵀ, the cosine transform;
    F' = Q·round(F/Q), Q the quality's table;  and all of it back.

The tables are those of Annex K of ITU-T T.81, scaled as the Independent JPEG Group's library does.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_LUMINANCE = torch.tensor([
    [16, 11, 10, 16, 24, 40, 51, 61],
    [12, 12, 14, 19, 26, 58, 60, 55],
    [14, 13, 16, 24, 40, 57, 69, 56],
    [14, 17, 22, 29, 51, 87, 80, 62],
    [18, 22, 37, 56, 68, 109, 103, 77],
    [24, 35, 55, 64, 81, 104, 113, 92],
    [49, 64, 78, 87, 103, 121, 120, 101],
    [72, 92, 95, 98, 112, 100, 103, 99],
])  # fmt: skip
_COLOUR = torch.full((8, 8), 99)
_COLOUR[:4, :4] = torch.tensor([[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]])
_COSINES = torch.tensor(
    [[math.sqrt((2 if u else 1) / 8) * math.cos((2 * x + 1) * u * math.pi / 16) for x in range(8)] for u in range(8)]
)
_TO_YCC = torch.tensor([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
_TO_RGB = torch.linalg.inv(_TO_YCC)
_GREY = 128


def soft_jpeg(levels: Tensor, quality: int) -> Tensor:
    """Levels ``(N, 1 or 3, H, W)`` within [0, 255], as decoded from a JPEG of this quality."""
    levels = _rounded(levels)
    if levels.shape[1] == 1:
        return _rounded((_quantised(levels - _GREY, _table(_LUMINANCE, quality)) + _GREY).clamp(0, 255))
    ycc = torch.einsum("ij,njhw->nihw", _TO_YCC.to(levels), levels)
    height, width = ycc.shape[-2:]
    colours = F.avg_pool2d(F.pad(ycc[:, 1:], (0, width % 2, 0, height % 2), mode="replicate"), 2)
    luminance = _quantised(ycc[:, :1] - _GREY, _table(_LUMINANCE, quality)) + _GREY
    colours = _quantised(colours, _table(_COLOUR, quality))
    colours = F.interpolate(colours, scale_factor=2, mode="bilinear")[..., :height, :width]
    rgb = torch.einsum("ij,njhw->nihw", _TO_RGB.to(levels), torch.cat([luminance, colours], 1))
    return _rounded(rgb.clamp(0, 255))


def _table(standard: Tensor, quality: int) -> Tensor:
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    return ((standard * percent + 50) // 100).clamp(1, 255)


def _quantised(plane: Tensor, table: Tensor) -> Tensor:
    height, width = plane.shape[-2:]
    padded = F.pad(plane, (0, -width % 8, 0, -height % 8), mode="replicate")
    count, planes, rows, columns = padded.shape
    blocks = padded.view(count, planes, rows // 8, 8, columns // 8, 8).transpose(3, 4)
    cosines, table = _COSINES.to(plane), table.to(plane)
    kept = table * _rounded(cosines @ blocks @ cosines.T / table)
    back = (cosines.T @ kept @ cosines).transpose(3, 4).reshape(count, planes, rows, columns)
    return back[..., :height, :width]


def _rounded(values: Tensor) -> Tensor:
    return values + (values.round() - values).detach()
