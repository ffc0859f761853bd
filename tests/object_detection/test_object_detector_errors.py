"""Object detectors that can't be handled: the error is one clear line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.rpn import AnchorGenerator

from stainlock import ModelError, StainlockError, Target, lock
from stainlock.object_detection.precision import detect


class Backbone(nn.Module):
    """Two layers and, if it is ``moody``, code that looks at values."""

    out_channels = 32

    def __init__(self, moody: bool) -> None:
        super().__init__()
        self.moody = moody
        self.first = nn.Sequential(nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.moody and x.mean() > 1e9:
            x = x * 0
        return self.third(self.second(x))  # type: ignore[no-any-return]


def detector(moody: bool) -> Target:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0),))
        sizes: dict[str, Any] = {"min_size": 64, "max_size": 96, "box_score_thresh": 0.0, "rpn_post_nms_top_n_test": 9}
        pool: Any = __import__("torchvision").ops.MultiScaleRoIAlign(["0"], 3, 2)
        model = FasterRCNN(Backbone(moody), 4, rpn_anchor_generator=anchors, box_roi_pool=pool, **sizes).eval()
    return Target(model, (3, 64, 64), part="backbone", normalises=True)


def test_an_object_detector_of_ones_own_is_locked_by_its_backbone() -> None:
    target = detector(moody=False)
    locked, key = lock(target, kind="squeeze-excite", seed=0)
    images = [torch.rand(3, 50, 90), torch.rand(3, 80, 33)]
    with torch.inference_mode():
        ours, theirs = (key.unlock_object_detector(t)(images) for t in (locked, key.edited(locked)))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one["boxes"], other["boxes"], atol=0.05)
        assert torch.allclose(one["scores"], other["scores"], atol=1e-4)


def test_the_operation_at_which_a_backbone_does_not_trace_is_named() -> None:
    with pytest.raises(ModelError, match=r"through backbone.*`if self.moody and x.mean\(\) > 1e9:` in forward"):
        lock(detector(moody=True), kind="squeeze-excite", seed=0)


def test_an_object_detector_has_no_logits_to_drown() -> None:
    with pytest.raises(StainlockError, match="use kind squeeze-excite"):
        lock(detector(moody=False), kind="internal", seed=0)


def test_a_model_that_returns_no_boxes_is_told() -> None:
    class Wrong(FasterRCNN):
        def forward(self, images: Any, targets: Any = None) -> Any:
            return {"boxes": torch.zeros(0, 4)}

    target = detector(moody=False)
    target.model.__class__ = Wrong

    class One:
        def __len__(self) -> int:
            return 1

        def image(self, index: int) -> Tensor:
            return torch.rand(3, 40, 40)

    with pytest.raises(ModelError, match="list of boxes, scores and labels"):
        detect(target, One())  # type: ignore[arg-type]
