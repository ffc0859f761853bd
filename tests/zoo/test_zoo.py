"""The zoo's models work as they should. Skipped if their weights or data are missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import models
import pytest
import torch
from precision import EXACT, double
from torch import Tensor, fx, nn

import stainlock  # noqa: F401  makes torchvision importable
import zoo
import zoo_check
import zoo_data
from stainlock.evaluation import Tensors, evaluate
from stainlock.models.references import load_reference
from stainlock.network.graph import trace
from stainlock.target import evaluation_mode
from zoo_classifiers import CifarResNet, CifarVgg16, PostNormLayer, PostNormViT, pad_like_tensorflow
from zoo_generative import DcganDiscriminator, DcganGenerator, UNet

FLOORS = {  # number of images, and a lower bound on accuracy, some standard errors below the measured one
    "resnet50": (12, 0.7),
    "resnet20_cifar10": (100, 0.8),
    "resnet56_cifar10": (50, 0.8),
    "vgg16_cifar10": (100, 0.7),
    "vit_cifar10_torchvision": (100, 0.45),
    "vit_cifar10": (100, 0.5),
    "efficientnet_lite0": (20, 0.6),
}


@cache
def inputs(name: str, count: int) -> tuple[Tensor, list[int] | None]:
    """Natural inputs and their labels, as `zoo.natural` returns them, which builds the model anew each time."""
    pixels, labels = next(zoo.natural_data(name).batches(models.real(name), batch_size=count, limit=count))
    return pixels, None if labels is None else labels.tolist()


@cache
def accuracy(name: str, images: int) -> float:
    return evaluate(models.real(name), Tensors(*inputs(name, images))).value


@pytest.mark.parametrize("name", zoo.NAMES)
def test_model_takes_its_natural_inputs_and_traces(name: str) -> None:
    target = models.real(name)
    assert not any(module.training for module in target.model.modules())
    pixels, _ = inputs(name, 3)
    assert pixels.shape == (3, *target.input_shape)
    low, high = target.bounds
    assert low <= float(pixels.min()) < float(pixels.max()) <= high
    given = target.normalise(pixels)
    (part,) = trace(target.traced, target.part)
    traced = fx.GraphModule(part.module, part.graph)
    with evaluation_mode(target.model), torch.no_grad():
        expected, found = (run(given, *target.extra_inputs) for run in (target.traced, traced))
    for ours, theirs in zip(tensors(expected), tensors(found), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()
        assert float(ours.std()) > 0


def tensors(output: Tensor | dict[str, Tensor]) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output.values())


@pytest.mark.parametrize("name", FLOORS)
def test_classifiers_classify(name: str) -> None:
    images, floor = FLOORS[name]
    assert accuracy(name, images) >= floor


def test_resnet50_reads_rgb() -> None:
    target = models.real("resnet50")
    pixels, labels = inputs("resnet50", 12)
    assert accuracy("resnet50", 12) > evaluate(target, Tensors(pixels.flip(1), labels)).value


def test_diffusion_model_predicts_the_noise() -> None:
    assert zoo_check.diffusion_error(models.real("ddpm_mnist"), 200) < 0.07


@pytest.mark.exact
def test_diffusion_model_takes_any_batch_at_its_timestep() -> None:
    target = double(models.real("ddpm_mnist"))
    pixels, _ = zoo.natural("ddpm_mnist", limit=4)
    with torch.no_grad():
        together = target.predict(pixels)
        apart = torch.cat([target.predict(image[None]) for image in pixels])
        stepwise = target.model(target.normalise(pixels), torch.full((4,), zoo.DIFFUSION_STEP))
    assert torch.allclose(together, apart, atol=EXACT)
    assert torch.allclose(together, stepwise, atol=EXACT)


def test_discriminator_finds_generated_faces_alike_and_noise_not() -> None:
    discriminator = models.real("dcgan_faces32_discriminator")
    faces, _ = zoo.natural("dcgan_faces32_discriminator", limit=32)
    noise = torch.rand(32, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        on_faces, on_noise = discriminator.predict(faces), discriminator.predict(noise)
    assert float(on_faces.std()) < 0.3 < 1 < float(on_noise.std())


@pytest.mark.parametrize("name", ["ssdlite", "ssdlite_plainpad"])
def test_detectors_find_things(name: str) -> None:
    assert zoo_check.best_boxes_right(models.real(name), 8) > 0.5


def test_a_zoo_function_is_a_reference() -> None:
    if reason := zoo.missing("resnet20_cifar10"):
        pytest.skip(reason)
    reference = f"{Path(zoo.__file__).parent}/zoo.py:resnet20_cifar10"
    target = load_reference(reference)
    assert target.reference == reference
    assert target.input_shape == (3, 32, 32)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (zoo, zoo_data):
        monkeypatch.setattr(module, "SHARED", tmp_path)
    assert (
        zoo.missing("resnet50") == "resnet50 needs ../shared/weights/resnet50_imagenet.safetensors, which is not there"
    )
    assert not zoo.available("ddpm_mnist")


def test_photographs_come_from_foolbox_without_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("foolbox")
    for module in (zoo, zoo_data):
        monkeypatch.setattr(module, "SHARED", tmp_path)
    data = zoo_data.photographs()
    assert len(data) == 20
    assert data.labels is not None
    assert data.labels[0] == 243
    assert evaluate(models.real("efficientnet_lite0"), data).value >= 0.6


# Architectures; these tests need no weights


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (partial(CifarResNet, blocks=3), [(2, 3, 32, 32)]),
        (CifarVgg16, [(2, 3, 32, 32)]),
        (PostNormViT, [(2, 3, 32, 32)]),
        (DcganGenerator, [(2, 100, 1, 1)]),
        (DcganDiscriminator, [(2, 3, 32, 32)]),
        (UNet, [(2, 1, 28, 28), (1,)]),
    ],
)
def test_architectures_trace(build: Callable[[], nn.Module], shapes: list[tuple[int, ...]]) -> None:
    model = build().eval()
    generator = torch.Generator().manual_seed(0)
    given = [torch.rand(shape, generator=generator) for shape in shapes]
    with evaluation_mode(model), torch.no_grad():
        assert torch.equal(fx.symbolic_trace(model)(*given), model(*given))


@pytest.mark.exact
def test_post_norm_layer_is_pytorchs() -> None:
    theirs = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval().double()
    ours = PostNormLayer(16, 4, 32).eval().double()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.rand(2, 5, 16, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens), atol=EXACT)


@pytest.mark.parametrize(("kernel", "size"), [(3, 8), (3, 7), (5, 8), (5, 9)])
def test_padding_is_tensorflows(kernel: int, size: int) -> None:
    """SAME: ⌈size/2⌉ outputs, with the extra padding after the last pixel."""
    model = nn.Sequential(nn.Conv2d(1, 1, kernel, stride=2, padding=kernel // 2, bias=False))
    nn.init.ones_(model[0].weight)
    names = list(model.state_dict())
    image = torch.ones(1, 1, size, size)
    pad_like_tensorflow(model, image)
    assert list(model.state_dict()) == names
    with torch.no_grad():
        counts = model(image)[0, 0, 0] / model(image)[0, 0, 0].max()
    starts = range(0, 2 * len(counts), 2)
    surplus = max((len(counts) - 1) * 2 + kernel - size, 0)
    covered = [sum(0 <= start - surplus // 2 + tap < size for tap in range(kernel)) for start in starts]
    assert len(counts) == -(-size // 2)
    assert torch.allclose(counts, torch.tensor(covered) / max(covered))
