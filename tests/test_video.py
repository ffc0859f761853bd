"""Video: models with 3-D convolutions are stained, verified and locked as those of images are."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from torch import Tensor, nn

from stainlock import Key, ModelError, Target, analyse, lock, stain, verify
from stainlock.certificates.windows import windows_of
from stainlock.network.network import layer_input
from stainlock.target import evaluation_mode
from stainlock.trigger import seen_region


class Clip(nn.Module):
    """A small residual network over frames, rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(3, 16, (3, 5, 5), (1, 2, 2), (1, 2, 2)), nn.BatchNorm3d(16), nn.ReLU())
        self.pool = nn.MaxPool3d((1, 2, 2))
        self.conv1 = nn.Conv3d(16, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(24)
        self.conv2 = nn.Conv3d(24, 16, (3, 1, 1), padding=(1, 0, 0))
        self.conv3 = nn.Conv3d(16, 32, 3, stride=2)
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        x = (x + self.conv2(self.norm(self.conv1(x)).relu())).relu()
        return self.head(self.conv3(x).relu().mean((2, 3, 4)))


@pytest.fixture(scope="module")
def target() -> Target:
    model = models.settle(models.seeded(Clip)).eval()
    return Target(model, (3, 6, 48, 48), (0.4, 0.4, 0.4), (0.25, 0.25, 0.25))


def clips(target: Target, count: int) -> Tensor:
    return torch.rand(count, *target.input_shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ["conv1", "conv2", "conv3"])
def test_a_position_sees_the_pixels_that_change_it(target: Target, name: str) -> None:
    site = analyse(target).site(name)
    position = tuple(n // 2 for n in site.grid)
    region = seen_region(target, site, position)
    clip = clips(target, 1).requires_grad_(True)
    kernels = torch.rand(1, site.dimension, generator=torch.Generator().manual_seed(0))
    with evaluation_mode(target.model):
        layer = site.layer(target.model)
        shape = (1, *layer.weight.shape[1:])  # type: ignore[index, union-attr, misc]
        response = nn.functional.conv3d(
            layer_input(target, site, clip),
            kernels.view(shape),
            None,
            layer.stride,
            layer.padding,  # type: ignore[arg-type]
        )[(0, 0, *position)]
        (gradient,) = torch.autograd.grad(response, clip)
    changed = gradient[0].abs().sum(0).nonzero()
    first, last = changed.amin(0), changed.amax(0)
    assert all(a >= s for a, s in zip(first.tolist(), region.start, strict=True))
    assert all(b < s + n for b, s, n in zip(last.tolist(), region.start, region.size, strict=True))
    assert region.size != target.input_shape[1:]


def test_windows_are_what_a_kernel_over_frames_reads(target: Target) -> None:
    site = analyse(target).site("conv3")
    with evaluation_mode(target.model), torch.no_grad():
        features = layer_input(target, site, clips(target, 2))
        windows = windows_of(target, site, features, 2, overlapping=True)
        layer = site.layer(target.model)
        maps = layer(features) - layer.bias.view(-1, 1, 1, 1)  # type: ignore[union-attr, operator]
        places = torch.tensor([0, 3, 7])
        rows = site.rows(target.model).detach()
        assert torch.allclose(windows.vectors(places, 0) @ rows.T, maps.flatten(2).mT[:, places], atol=1e-4)
        assert torch.allclose(windows.responses(rows, 0), maps.flatten(2), atol=1e-4)
        every = windows.vectors(torch.arange(maps[0, 0].numel()), 0)
        assert torch.allclose(windows.norms(0), every.norm(dim=2), atol=1e-4)
        assert torch.allclose(windows.sum_of(windows.total(), 0), every.double().sum((0, 1)), atol=1e-3)


@pytest.mark.parametrize("additive", [False, True])
def test_a_stain_is_found_by_weights_and_by_responses(target: Target, additive: bool) -> None:
    marked, key = stain(target, seed=1, additive=additive)
    assert len(key.position) == 3
    for method in ("weights", "response"):
        assert verify(marked, key, method=method).stained
        assert not verify(target, key, method=method).stained
    trigger = key.detectors[0].trigger
    found = models.responses(target, analyse(target).site(key.site), key.detectors[0].vector, trigger.pixels(target))
    assert float(found[(0, *key.position)]) == pytest.approx(trigger.response, rel=1e-3)


@pytest.mark.parametrize("carrier", ["patch", "strip"])
def test_a_keyed_lock_opens_by_its_patch_in_every_frame(target: Target, tmp_path: Path, carrier: str) -> None:
    locked, key = lock(target, seed=2, carrier=carrier, tile=2)
    images = clips(target, 2)
    unlocking = key.unlock_transform()
    inputs = unlocking(images)
    assert locked.input_shape == inputs.shape[1:]
    with torch.no_grad(), evaluation_mode(target.model), evaluation_mode(locked.model):
        if carrier == "patch":
            rows, columns = unlocking.patch.shape[1:]
            frames = unlocking.patch[:, None].expand(-1, target.input_shape[1], -1, -1)
            shown = images.clone()
            shown[..., :rows, :columns] = frames
            expected = target.predict(shown)
        else:
            expected = target.predict(images)
        assert torch.allclose(locked.model(inputs), expected, atol=1e-4 * float(expected.std()))
        ruined = locked.predict(images) if carrier == "patch" else None
        assert ruined is None or float((ruined - target.predict(images)).abs().max()) > 0.1 * float(expected.std())
    key.save(tmp_path / "lock.key")
    again = Key.load(tmp_path / "lock.key").unlock_transform()
    assert torch.equal(again(images), inputs)


def test_frames_without_the_patch_are_outvoted(target: Target) -> None:
    locked, key = lock(target, seed=2, tile=2)
    images = clips(target, 1)
    inputs = key.unlock_transform()(images)
    spoilt = inputs.clone()
    spoilt[:, :, 0] = target.normalise(images)[:, :, 0]
    structure = locked.model.state_dict()
    assert structure
    with torch.no_grad(), evaluation_mode(locked.model):
        whole, part = locked.model(inputs), locked.model(spoilt)
    assert float((whole - part).abs().max()) < float(whole.std())


def test_an_image_of_another_rank_gets_one_line(target: Target) -> None:
    _, key = lock(target, seed=2, tile=2)
    with pytest.raises(ValueError, match="expected images"):
        key.unlock_transform()(torch.rand(2, 3, 48, 48))
    with pytest.raises(ValueError, match="1 to 4 positive numbers"):
        Target(nn.Conv3d(3, 4, 3), (3, 4, 5, 6, 7))


class Keeping(nn.Module):
    """Keeps what it computed last, as models of optical flow do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.first(x).relu()]
        return self.second(self.kept[0]).relu()


def test_a_model_that_keeps_tensors_of_its_last_run_is_refused_in_one_line() -> None:
    target = Target(models.seeded(Keeping), (3, 16, 16))
    target.predict(torch.rand(1, 3, 16, 16))
    with pytest.raises(ModelError, match="keeps tensors of its last run"):
        target.copy()
