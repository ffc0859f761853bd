"""torchvision's compiled operators in Python, for when they do not load; see `torchvision_import`.

``nms`` and ``roi_align`` have CPU implementations, the latter with its gradient.  The other operators are declared but
have no kernel, so using them raises ``NotImplementedError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_POOL = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_BCHW = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_CONV = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align(Tensor input, Tensor rois, {_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOL}, {_BCHW}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align(Tensor input, Tensor rois, float input_scale, int input_zero_point, float rois_scale, "
    f"int rois_zero_point, {_POOL}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOL}, {_BCHW}) -> Tensor",
    f"ps_roi_align(Tensor input, Tensor rois, {_POOL}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL}, int sampling_ratio, "
    f"{_BCHW}) -> Tensor",
    f"ps_roi_pool(Tensor input, Tensor rois, {_POOL}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOL}, {_BCHW}) -> Tensor",
    f"deform_conv2d({_CONV}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_CONV}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "box_iou_rotated(Tensor boxes1, Tensor boxes2) -> Tensor",
    "_cuda_version() -> int",
)
_BLOCK = 1024  # boxes per block of the suppression loop: bounds memory at _BLOCK * N


def _overlaps(a: Tensor, b: Tensor, threshold: float) -> Tensor:
    """``[len(a), len(b)]`` bool: IoU above ``threshold`` (0/0 counts as no overlap)."""
    ax0, ay0, ax1, ay1 = (c[:, None] for c in a.unbind(1))
    bx0, by0, bx1, by1 = b.unbind(1)
    inter = torch.minimum(ax1, bx1).sub_(torch.maximum(ax0, bx0)).clamp_(min=0)
    inter.mul_(torch.minimum(ay1, by1).sub_(torch.maximum(ay0, by0)).clamp_(min=0))
    area_a, area_b = (ax1 - ax0) * (ay1 - ay0), (bx1 - bx0) * (by1 - by0)
    iou = inter.div_((area_a + area_b).sub_(inter))
    rounded = torch.tensor(threshold, dtype=iou.dtype)  # compare as the compiled operator does, in double
    return iou >= rounded if rounded.item() > threshold else iou > rounded


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression; same result and order as the compiled operator."""
    order = scores.argsort(descending=True, stable=True)
    boxes = dets[order]
    alive = torch.ones(len(boxes), dtype=torch.bool)
    for start in range(0, len(boxes), _BLOCK):
        stop = min(start + _BLOCK, len(boxes))
        idx = alive[start:stop].nonzero().squeeze(1) + start
        block = boxes[idx]
        # Within a block: keep[j] = no kept i < j overlaps j.  Iterating from "all kept" reaches the
        # unique solution, the greedy one, after as many rounds as the longest suppression chain.
        over = _overlaps(block, block, iou_threshold).triu_(1).float()
        keep = over.new_ones(len(block))
        while True:
            new = ((keep @ over) == 0).float()
            if torch.equal(new, keep):
                break
            keep = new
        alive[start:stop] = False
        idx = idx[keep.bool()]
        alive[idx] = True
        if stop < len(boxes):
            rest = alive[stop:].nonzero().squeeze(1) + stop
            alive[rest] = ~_overlaps(boxes[idx], boxes[rest], iou_threshold).any(0)
    return order[alive]


def _axis(start: Tensor, bin_size: Tensor, grid: Tensor, n_bins: int, size: int) -> tuple[Tensor, Tensor]:
    """Pixels and weights sampled along one axis: two ``[K, n_bins, 2 * max(grid)]`` tensors."""
    step = torch.arange(max(int(grid.max()), 1), device=start.device)
    used = step < grid[:, None]
    grid = grid.clamp(min=1)
    bins = torch.arange(n_bins, device=start.device, dtype=start.dtype)[None, :, None]
    pos = (step.to(start.dtype) + 0.5)[None, None] * (bin_size / grid)[:, None, None]
    pos = start[:, None, None] + bins * bin_size[:, None, None] + pos
    valid = used[:, None] & (pos >= -1) & (pos <= size)
    pos = pos.clamp(0, size - 1)
    low = pos.floor()
    frac = pos - low
    weight = torch.stack((1 - frac, frac), -1) * (valid / grid.to(pos.dtype)[:, None, None])[..., None]
    low = low.long()
    pixel = torch.stack((low, (low + 1).clamp(max=size - 1)), -1)
    return pixel.flatten(2), weight.flatten(2)


def _roi_samples(
    rois: Tensor, scale: float, ph: int, pw: int, height: int, width: int, ratio: int, aligned: bool
) -> tuple[Tensor, Tensor]:
    """Flat pixel index into ``[N * H * W]`` and weight of every sample of every output bin."""
    x0, y0, x1, y1 = (rois[:, 1:] * scale - (0.5 if aligned else 0.0)).unbind(1)
    w, h = x1 - x0, y1 - y0
    if not aligned:
        w, h = w.clamp(min=1), h.clamp(min=1)

    def grid(extent: Tensor, bins: int) -> Tensor:
        return torch.full_like(extent, ratio).long() if ratio > 0 else (extent / bins).ceil().long()

    ys, wy = _axis(y0, h / ph, grid(h, ph), ph, height)
    xs, wx = _axis(x0, w / pw, grid(w, pw), pw, width)
    pixel = ys[:, :, None, :, None] * width + xs[:, None, :, None, :]
    pixel = pixel + (rois[:, 0].long() * (height * width))[:, None, None, None, None]
    weight = wy[:, :, None, :, None] * wx[:, None, :, None, :]
    return pixel.flatten(3).flatten(0, 2), weight.flatten(3).flatten(0, 2)


def _chunks(rois: Tensor, n: int) -> Iterator[tuple[int, Tensor]]:
    return ((i, rois[i : i + n]) for i in range(0, len(rois), n))


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Average of bilinear samples in every bin of every region; ``rois[k]`` is (image, x0, y0, x1, y1)."""
    _, channels, height, width = input.shape
    table = input.permute(0, 2, 3, 1).reshape(-1, channels).contiguous()
    out = input.new_empty(len(rois), pooled_height, pooled_width, channels)
    for i, part in _chunks(rois, 128):
        pixel, weight = _roi_samples(
            part, spatial_scale, pooled_height, pooled_width, height, width, sampling_ratio, aligned
        )
        bags = torch.nn.functional.embedding_bag(pixel, table, per_sample_weights=weight, mode="sum")
        out[i : i + len(part)] = bags.view(len(part), pooled_height, pooled_width, channels)
    return out.permute(0, 3, 1, 2).contiguous()


def _roi_align_backward(
    grad: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Gradient of ``roi_align`` with respect to its input."""
    table = grad.new_zeros(batch_size * height * width, channels)
    for i, part in _chunks(rois, 32):
        pixel, weight = _roi_samples(
            part, spatial_scale, pooled_height, pooled_width, height, width, sampling_ratio, aligned
        )
        g = grad[i : i + len(part)].permute(0, 2, 3, 1).reshape(-1, 1, channels)
        table.index_add_(0, pixel.flatten(), (g * weight[..., None]).flatten(0, 1))
    return table.view(batch_size, height, width, channels).permute(0, 3, 1, 2).contiguous()


def define_operators() -> torch.library.Library:
    """The operators of torchvision's ``_C``; they exist for as long as the returned library does."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CPU")
    library.impl("_roi_align_backward", _roi_align_backward, "CPU")
    library.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")
    return library


def connect_gradient(library: torch.library.Library) -> None:
    """Tell autograd that ``_roi_align_backward`` is the gradient of ``roi_align``."""

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, rois, *ctx.arguments = inputs
        ctx.shape = input.shape
        ctx.save_for_backward(rois)

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (rois,) = ctx.saved_tensors
        *bins, sampling_ratio, aligned = ctx.arguments
        operator = torch.ops.torchvision._roi_align_backward
        return operator(grad, rois, *bins, *ctx.shape, sampling_ratio, aligned), *[None] * 6

    torch.library.register_autograd("torchvision::roi_align", backward, setup_context=remember, lib=library)
