"""The patch behind an object detector's own resizing: exact for images of any size, and boxes where they belong."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from object_detectors_models import dense_outputs, largest_difference, random_object_detector
from stainlock import Key, ModelError, Target, lock
from stainlock.html.images import png
from stainlock.network.object_detectors import Resizing, area_growth, class_count, is_object_detector
from stainlock.unlocking.object_detectors import PatchedTransform, unlock_object_detector

# Rows and columns: tall, wide, tiny, larger than the network's own size, and very elongated.
SIZES = [(120, 160), (160, 120), (17, 23), (300, 60), (96, 96), (40, 400)]
# Resizing to small images keeps tests quick; what is tested does not depend on the size.
SMALL = {"shorter": 72, "longer": 120}
SMALL_DETECTORS = [
    pytest.param("fasterrcnn_resnet50_fpn", marks=pytest.mark.slow),
    pytest.param("fasterrcnn_resnet50_fpn_v2", marks=pytest.mark.slow),
    pytest.param("retinanet_resnet50_fpn", marks=pytest.mark.slow),
    pytest.param("fcos_resnet50_fpn", marks=pytest.mark.slow),
    "fasterrcnn_mobilenet_v3_large_fpn",
]


@cache
def locked_object_detector(name: str) -> tuple[Target, Target, Key]:
    """The original, the locked one and its key, made once per process: tests must not change them."""
    if name.startswith("ssdlite"):
        target = models.real(name)
    else:
        target = random_object_detector(name, **({} if name.startswith("ssd300") else SMALL))
    # "anywhere" is the default at the usual, larger image size.
    return target, *lock(target, kind="squeeze-excite", place="anywhere", seed=1)


def images(*sizes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, *size, generator=generator) for size in sizes]


def test_the_networks_own_size_is_left_alone_by_the_transform() -> None:
    """For every size and aspect ratio, the prepared image is passed to the backbone unchanged."""
    from torchvision.models.detection.transform import GeneralizedRCNNTransform

    transform = GeneralizedRCNNTransform(800, 1333, [0.0] * 3, [1.0] * 3).eval()
    holder = nn.Module()
    holder.transform = transform
    resizing = Resizing.of(holder)
    for size in [
        (375, 500),
        (500, 375),
        (480, 800),
        (333, 500),
        (427, 640),
        (60, 1900),
        (1, 7),
        (800, 800),
        (17, 2500),
    ]:
        own = resizing.size(*size)
        image = torch.rand(3, *own)
        resized, _ = transform.resize(image)
        assert torch.equal(resized, image), f"{size} prepared as {own} is resized to {tuple(resized.shape[1:])}"
    assert resizing.largest() == (1344, 1344)


def test_an_object_detector_is_told_from_other_models() -> None:
    target = locked_object_detector("fasterrcnn_mobilenet_v3_large_fpn")[0]
    assert is_object_detector(target.model)
    assert class_count(target.model) == 91
    assert area_growth(target) == pytest.approx(128 * 128 / (72 * 72))
    assert not is_object_detector(nn.Identity())
    assert area_growth(models.conv_net()) == 1.0


@pytest.mark.parametrize("name", SMALL_DETECTORS)
def test_unlocked_equals_edited_for_images_of_any_size(name: str) -> None:
    _, locked, key = locked_object_detector(name)
    unlocked, edited = key.unlock_object_detector(locked), key.unlock_object_detector(key.edited(locked))
    for batch in (images(*SIZES), images(*SIZES[:1]), images(*SIZES[-1:])):
        ours, theirs = dense_outputs(unlocked, batch), dense_outputs(edited, batch)
        assert largest_difference(ours, theirs) < 1e-3


@pytest.mark.parametrize("name", SMALL_DETECTORS)
def test_every_level_of_a_locked_detector_is_ruined(name: str) -> None:
    """At every level, the variation from image to image differs from that before."""
    _, locked, key = locked_object_detector(name)
    pictures = [_picture(seed) for seed in range(6)]
    before, after = (dense_outputs(target, pictures) for target in (key.edited(locked), locked))
    for level in (name for name in before if name.startswith("level")):
        ours, theirs = (values[level] - values[level].mean(0) for values in (after, before))
        left = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
        size = float((after[level] - before[level]).norm() / theirs.norm())
        assert size > 0.8, f"{level} is only {size:.2f} of its variation away"
        assert float(left) < 0.7 or float(ours.norm()) < 0.05 * float(theirs.norm()), f"{level}: {float(left):.2f} left"


def _picture(seed: int) -> Tensor:
    from stainlock.target import synthetic_inputs

    base = Target(nn.Identity(), (3, 96, 128))
    return synthetic_inputs(base, 1, torch.Generator().manual_seed(seed))[0]


def test_boxes_come_out_in_the_images_own_coordinates() -> None:
    """Unlocked boxes are the edited object detector's, for a batch of different sizes; and lie within their image."""
    _, locked, key = locked_object_detector("ssdlite_plainpad")
    unlocked, edited = key.unlock_object_detector(locked), key.unlock_object_detector(key.edited(locked))
    batch = images(*SIZES)
    with torch.inference_mode():
        ours, theirs = unlocked(batch), edited(batch)
    for image, one, other in zip(batch, ours, theirs, strict=True):
        rows, columns = image.shape[-2:]
        assert one["boxes"][:, [0, 2]].max() <= columns
        assert one["boxes"][:, [1, 3]].max() <= rows
        for box, score, label in zip(one["boxes"][:10], one["scores"], one["labels"], strict=False):
            same = (other["labels"] == label) & ((other["scores"] - score).abs() < 1e-3)
            assert ((other["boxes"][same] - box).abs().amax(1) < 1e-3 * max(rows, columns)).any()


def test_an_image_at_the_networks_own_size_unlocks_by_the_key_alone() -> None:
    _, locked, key = locked_object_detector("ssdlite_plainpad")
    own = images((320, 320))
    with torch.inference_mode():
        by_image, by_transform = locked(key.unlock(own[0][None])), key.unlock_object_detector(locked)(own)
    assert torch.allclose(by_image[0]["boxes"], by_transform[0]["boxes"], atol=1e-2)
    with pytest.raises(ValueError, match="detector's own size, 320×320"):
        key.unlock(images((320, 300))[0][None])


def test_the_clients_png_unlocks_like_the_key(tmp_path: Path) -> None:
    _, locked, key = locked_object_detector("fasterrcnn_mobilenet_v3_large_fpn")
    (tmp_path / "t.png").write_bytes(png(key.detectors[0].trigger.levels))
    ours = dense_outputs(unlock_object_detector(locked, tmp_path / "t.png"), images((50, 70)))
    assert largest_difference(ours, dense_outputs(key.unlock_object_detector(locked), images((50, 70)))) < 1e-6


def test_the_locked_detector_stays_as_it_is() -> None:
    """Unlocking shares the weights, holds no secret in a state dict, and can be done over and again."""
    _, locked, key = locked_object_detector("fasterrcnn_mobilenet_v3_large_fpn")
    before, transform = models.snapshot(locked.model), locked.model.transform
    own = images((50, 70))
    untouched = own[0].clone()
    unlocked = key.unlock_object_detector(key.unlock_object_detector(locked))
    dense_outputs(unlocked, own)
    models.assert_untouched(before, locked.model)
    assert locked.model.transform is transform
    assert torch.equal(own[0], untouched)
    unlocked_transform: Any = unlocked.model.transform
    assert isinstance(unlocked_transform, PatchedTransform)
    assert unlocked_transform.inner is transform
    assert set(unlocked.model.state_dict()) == set(locked.model.state_dict())
    assert next(unlocked.model.parameters()) is next(locked.model.parameters())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "at least one image, got an empty list"),
        ([torch.rand(1, 50, 60)], "repeat a grey image's channel"),
        ([torch.rand(4, 50, 60)], "leave out the alpha channel"),
        ([torch.rand(50, 60)], r"expected images \(3, H, W\), got \(50, 60\)"),
        (torch.rand(3, 50, 60), "put it into a list"),
        ([torch.zeros(3, 50, 60, dtype=torch.uint8)], "divide uint8 by 255"),
    ],
)
def test_images_that_an_object_detector_cant_take_are_told(batch: Any, message: str) -> None:
    _, locked, key = locked_object_detector("fasterrcnn_mobilenet_v3_large_fpn")
    with pytest.raises(ValueError, match=message):
        key.unlock_object_detector(locked)(batch)


def test_an_image_too_elongated_for_the_patch_is_told() -> None:
    """Padding to a multiple of 32 makes room for a patch; without it, a narrow image is too small."""
    _, locked, key = locked_object_detector("fasterrcnn_mobilenet_v3_large_fpn")
    unlocked = key.unlock_object_detector(locked.copy())
    transform: Any = unlocked.model.transform
    transform.inner.size_divisible = 1
    with pytest.raises(ValueError, match="at least the patch's"):
        unlocked(images((4, 400)))


def test_only_object_detectors_have_a_transform_to_unlock() -> None:
    key = locked_object_detector("fasterrcnn_mobilenet_v3_large_fpn")[2]
    with pytest.raises(ModelError, match=r"key\.unlock\(images\)"):
        key.unlock_object_detector(models.conv_net())


def test_a_grey_png_is_no_trigger_for_an_object_detector(tmp_path: Path) -> None:
    locked = locked_object_detector("fasterrcnn_mobilenet_v3_large_fpn")[1]
    Image.new("L", (9, 9)).save(tmp_path / "grey.png")
    with pytest.raises(ValueError, match="colour"):
        unlock_object_detector(locked, tmp_path / "grey.png")
