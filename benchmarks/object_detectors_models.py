"""Object detectors with random weights and features of realistic size, which is enough to test exactness."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stainlock import Target
from stainlock.network.norms import is_batch_norm
from stainlock.target import evaluation_mode, synthetic_inputs

# Untrained scores are all alike: a threshold of 0 lets boxes through, and limits on their number keep it fast.
FEW_BOXES = {
    "fasterrcnn": "box_score_thresh=0&box_detections_per_img=20&rpn_post_nms_top_n_test=99&rpn_pre_nms_top_n_test=200",
    "retinanet": "score_thresh=0.0&topk_candidates=50&detections_per_img=20",
    "fcos": "score_thresh=0.0&topk_candidates=50&detections_per_img=20",
    "ssd300": "score_thresh=0.0&topk_candidates=20&detections_per_img=20",
    "ssdlite320": "score_thresh=0.0&topk_candidates=20&detections_per_img=20",
}


def random_object_detector(
    name: str, *, shorter: int | None = None, longer: int | None = None, seed: int = 0
) -> Target:
    """torchvision's object detector of this name; ``shorter`` and ``longer`` are the sides it resizes images to."""
    query = FEW_BOXES[name.partition("_")[0]]
    if shorter is not None:
        query += f"&min_size={shorter}&max_size={longer}"
    target = Target.from_reference(f"torchvision:{name}?{query}", weights="random", seed=seed)
    return settle(target)


def settle(target: Target) -> Target:
    """Estimate batch-norm statistics on synthetic inputs, so that no layer's output fades or explodes."""

    def measure(module: Any, given: tuple[Tensor, ...]) -> None:
        values = given[0].detach()
        if values.dim() == 4:
            module.running_mean.copy_(values.mean((0, 2, 3)))
            module.running_var.copy_(values.var((0, 2, 3)) + 1e-4)

    norms = [module for module in target.model.modules() if is_batch_norm(module)]
    handles = [norm.register_forward_pre_hook(measure) for norm in norms]
    try:
        with evaluation_mode(target.model), torch.no_grad():
            target.predict(synthetic_inputs(target, 2, torch.Generator().manual_seed(0)))
    finally:
        for handle in handles:
            handle.remove()
    return target


def dense_outputs(target: Target, images: list[Tensor], proposals: Any = None) -> dict[str, Tensor]:
    """Everything an object detector computes before boxes are selected: features of every level, and head outputs.

    A second stage is run on ``proposals``, by default a fixed set of boxes, so that two models can be compared.
    """
    model: Any = target.model
    with evaluation_mode(model), torch.inference_mode():
        batch, _ = model.transform(images)
        features = model.backbone(batch.tensors)
        features = {"0": features} if isinstance(features, Tensor) else features
        found = {f"level {name}": value for name, value in features.items()}
        levels = list(features.values())
        if hasattr(model, "rpn"):
            for kind, maps in zip(("objectness", "proposal deltas"), model.rpn.head(levels), strict=True):
                found |= {f"{kind} {i}": value for i, value in enumerate(maps)}
            given = proposals or [_grid_boxes(size) for size in batch.image_sizes]
            regions = model.roi_heads.box_roi_pool(features, given, batch.image_sizes)
            scores, deltas = model.roi_heads.box_predictor(model.roi_heads.box_head(regions))
            found |= {"scores": scores, "boxes": deltas}
        else:
            found |= model.head(levels)
    return found


def _grid_boxes(size: tuple[int, int]) -> Tensor:
    """Boxes of many sizes all over an image, the same for every model."""
    rows, columns = size
    generator = torch.Generator().manual_seed(0)
    corner = torch.rand(48, 2, generator=generator) * torch.tensor([columns, rows])
    side = torch.tensor([16.0, 48.0, 144.0]).repeat(16)[:, None] * torch.rand(48, 2, generator=generator)
    return torch.cat([corner, corner + side + 4], 1)


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference at any output, relative to the largest value there."""
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-30)) for n in theirs)


def least_ruin(locked: dict[str, Tensor], original: dict[str, Tensor]) -> float:
    """The difference at the output that differs least from the original's, relative to its variation."""
    return min(
        float((locked[n] - original[n]).norm() / (original[n] - original[n].mean()).norm().clamp(min=1e-30))
        for n in original
    )


def small_fasterrcnn() -> Target:
    """Faster R-CNN that resizes images to about a quarter of the usual side."""
    return random_object_detector("fasterrcnn_resnet50_fpn_v2", shorter=192, longer=256)
