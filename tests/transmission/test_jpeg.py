"""The differentiable JPEG compared with Pillow's, and the changes that robust triggers must survive."""

from __future__ import annotations

import models
import pytest
import torch

from stainlock import Target, stain
from stainlock.target import Region, synthetic_inputs
from stainlock.transmission.changes import jpeg, usual_changes
from stainlock.transmission.jpeg import soft_jpeg
from stainlock.transmission.look_alikes import count_of, look_alikes
from stainlock.transmission.robust import Robust
from stainlock.verification.survival import UNCHANGED, survivors


def pictures(channels: int, height: int, width: int) -> tuple[Target, torch.Tensor]:
    target = Target(torch.nn.Flatten(), (channels, height, width), mean=(0,), std=(1,))
    fields = synthetic_inputs(target, 4, torch.Generator().manual_seed(0))[:2]
    return target, target.from_bytes(target.to_bytes(fields))


@pytest.mark.parametrize("quality", [95, 75, 50])
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 48), (1, 32, 48), (3, 30, 37)])
def test_it_does_what_pillow_does(quality: int, channels: int, height: int, width: int) -> None:
    target, pixels = pictures(channels, height, width)
    real = 255 * jpeg(target, quality)(pixels)
    ours = soft_jpeg(255 * pixels, quality)
    change = float((real - 255 * pixels).abs().mean())
    assert float((real - ours).abs().mean()) < 0.5 * change
    assert torch.equal(ours, ours.round())
    assert 0 <= float(ours.min()) <= float(ours.max()) <= 255


def test_gradients_pass_it() -> None:
    _, pixels = pictures(3, 32, 32)
    levels = (255 * pixels).requires_grad_(True)
    (gradient,) = torch.autograd.grad(soft_jpeg(levels, 50).sum(), levels)
    assert torch.isfinite(gradient).all()
    assert float(gradient.abs().mean()) > 0.1


def test_look_alikes_are_as_many_as_is_said() -> None:
    for channels in (1, 2, 3, 4):
        assert len(look_alikes(torch.rand(channels, 8, 8), 0.5)) == count_of(channels)


def test_changes_are_made_to_the_whole_picture_around_what_is_optimised() -> None:
    target, pixels = pictures(3, 32, 32)
    part = Region((8, 4), (16, 20))
    robust = Robust(target, part, torch.Generator().manual_seed(0), repels=True)
    cut = part.cut(pixels).requires_grad_(True)
    seen = []
    for step in range(8):
        value = robust.value(
            step, cut, lambda given: seen.append(given.shape) or given, lambda maps: maps.mean((1, 2, 3))
        )
        assert value.shape == (2,)
        assert torch.autograd.grad(value.sum(), cut, allow_unused=True)[0] is not None
    assert set(seen) == {(2, 3, 16, 20)}
    with pytest.raises(ValueError, match="expected pictures as inputs for robust triggers"):
        Robust(Target(torch.nn.Flatten(), (8,), mean=(0,), std=(1,)), part, torch.Generator(), repels=False)


def test_robust_triggers_survive_what_plain_ones_do_not() -> None:
    """More triggers survive, on real weights with the same seed and site, with ``robust`` than without."""
    options = {"schema": "output", "count": 16, "seed": 1}
    plain = models.stained("resnet20_cifar10", **options)
    robust = models.stained("resnet20_cifar10", **options, robust=True)
    before, after = survivors(*plain), survivors(*robust)
    assert before[UNCHANGED] == after[UNCHANGED] == 16
    for quality in (95, 75, 50):
        assert after[f"JPEG {quality}"] == 16
    assert before["JPEG 95"] <= 8
    assert sum(after.values()) > 1.5 * sum(before.values())
    assert set(after) == {UNCHANGED, *usual_changes(robust[0])}


def test_other_schemas_have_robust_triggers_too() -> None:
    target = models.real("resnet20_cifar10")
    found = {robust: survivors(*stain(target, seed=2, robust=robust)) for robust in (False, True)}
    assert found[True][UNCHANGED] == 1
    assert found[True]["JPEG 75"] == 1
    assert sum(found[True].values()) >= sum(found[False].values())


def test_what_is_no_picture_can_have_no_robust_trigger() -> None:
    with pytest.raises(ValueError, match="expected pictures as inputs for robust triggers"):
        stain(models.transposed_net(), robust=True)
