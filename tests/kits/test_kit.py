"""Client kits: they run without stainlock, and reveal nothing about the owner."""

from __future__ import annotations

import importlib.util
import stat
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from elsewhere import run_elsewhere
from torch import Tensor, nn

import stainlock as sl
from stainlock import Key, Target
from stainlock.errors import ModelError
from stainlock.unlocking import NoiseUnlock, Unlock

NET = """
from torch import nn

def net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )
"""


def net() -> Target:
    scope: dict[str, Any] = {}
    exec(NET, scope)
    model = models.settle(scope["net"]())
    return Target(model, (3, 40, 40), (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), (-1.0, 1.0), reference="owner.py:net")


def noise_net() -> Target:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.ConvTranspose2d(12, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4))
    return Target(models.settle(layers), (12, 1, 1), (0.0,), (1.0,), (-1.0, 1.0))


def clip_net() -> Target:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv3d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 16, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    return Target(layers.eval(), (3, 4, 40, 40), (0.4,), (0.2,))


@dataclass
class Made:
    folder: Path
    target: Target
    key: Key | None
    inputs: Tensor
    expected: Tensor


Case = tuple[Callable[[], Target], dict[str, Any] | None, str]
QUICK: dict[str, Case] = {
    "patch as onnx": (net, {}, "onnx"),
    "patch as safetensors": (net, {}, "safetensors"),
    "strip as safetensors": (net, {"carrier": "strip"}, "safetensors"),
    "video as torch-export": (clip_net, {}, "torch-export"),
    "no lock as torch-export": (net, None, "torch-export"),
    "no lock as safetensors": (net, None, "safetensors"),
}
SLOW: dict[str, Case] = {
    "patch as torch-export": (net, {}, "torch-export"),
    "no lock as onnx": (net, None, "onnx"),
    "noise as torch-export": (noise_net, {}, "torch-export"),
    "strip as torch-export": (net, {"carrier": "strip"}, "torch-export"),
    "strip as onnx": (net, {"carrier": "strip"}, "onnx"),
    "video strip as torch-export": (clip_net, {"carrier": "strip"}, "torch-export"),
    "noise as onnx": (noise_net, {}, "onnx"),
    "real ResNet20 as torch-export": (lambda: models.real("resnet20_cifar10"), {}, "torch-export"),
    "real ResNet20, internal lock": (lambda: models.real("resnet20_cifar10"), {"kind": "internal"}, "torch-export"),
    "real ResNet20, squeeze-excite": (lambda: models.real("resnet20_cifar10"), {"kind": "squeeze-excite"}, "onnx"),
    "real ViT, vit lock": (lambda: models.real("vit_cifar10_torchvision"), {"kind": "vit"}, "torch-export"),
    "real DCGAN, gan lock": (lambda: models.real("dcgan_faces32_generator"), {"kind": "gan"}, "torch-export"),
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return made_kits(QUICK, tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    return made_kits(SLOW, tmp_path_factory.mktemp("slow"))


def made_kits(cases: dict[str, Case], root: Path) -> dict[str, Made]:
    """Every kit, with its outputs in a separate process; models whose data are missing are skipped."""
    found = {}
    for name, (build, options, kind) in cases.items():
        if kind == "onnx" and importlib.util.find_spec("onnxruntime") is None:
            continue
        try:
            target = build()
        except pytest.skip.Exception:
            continue
        key = None
        if options is not None:
            target, key = sl.lock(target, seed=1, **options)
        folder = root / name.replace(" ", "-")
        sl.client_kit(target, folder, key=key, format=kind)
        generator = torch.Generator().manual_seed(3)
        low, high = target.bounds
        shape = target.input_shape if key is None else tuple(key.conventions["input_shape"])
        inputs = low + (high - low) * torch.rand(3, *shape, generator=generator)
        with torch.no_grad():
            given = target.normalise(inputs) if key is None else key.unlock(inputs)
            expected = target(given)
        np.save(folder.with_suffix(".npy"), inputs.numpy())
        found[name] = Made(folder, target, key, inputs, expected)
    (root / "net.py").write_text(NET)
    script = """
import importlib.util, numpy
from pathlib import Path
def loader(folder):
    for name in ("gates", "load"):
        sys.modules.pop(name, None)
    sys.path.insert(0, folder)
    import load
    return load.load
"""
    torch_part, onnx_part = [script, "import torch, net"], [script]
    for made in found.values():
        part = onnx_part if (made.folder / "model.onnx").exists() else torch_part
        model = "net.net()" if (made.folder / "model.safetensors").exists() else ""
        wrap = "" if part is onnx_part else "torch.from_numpy"
        part.append(f"run = loader({made.folder.name!r})({model})")
        part.append(f"given = numpy.load('{made.folder.name}.npy')")
        part.append(f"numpy.save('{made.folder.name}.out.npy', numpy.asarray(run({wrap}(given))))")
    run_elsewhere("\n".join(torch_part), root)
    if len(onnx_part) > 1:
        run_elsewhere("\n".join(onnx_part), root, also_absent=("torch",))
    return found


@pytest.fixture(params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def one(request: pytest.FixtureRequest) -> Made:
    made: dict[str, Made] = request.getfixturevalue("quick" if request.param in QUICK else "slow")
    if request.param not in made:
        pytest.skip("needs weights or packages that are not here")
    return made[request.param]


def test_a_client_without_stainlock_gets_the_unlocked_outputs(one: Made) -> None:
    out = torch.from_numpy(np.load(one.folder.with_suffix(".out.npy")))
    assert torch.allclose(out, one.expected, atol=1e-4 * float(one.expected.abs().max()))


def test_a_kit_tells_nothing_of_the_owner(one: Made) -> None:
    """No paths of this machine, no source lines, nothing from the key, and not the name stainlock (bundles have it)."""
    secrets = [b"stainlock", str(Path(__file__).parents[2]).encode(), sys.prefix.encode(), b"site-packages", b"owner"]
    if one.key is not None:
        secrets.append(str(one.key.seed).encode() if one.key.seed > 1000 else b"\0no seed\0")
        secrets += [one.key.base_digest.encode(), one.key.protected_digest.encode()]
    for path in one.folder.rglob("*"):
        content = path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                content = b"".join(archive.read(name) for name in archive.namelist())
        for secret in secrets:
            assert secret not in content, f"{path.name} has {secret!r}"


def test_a_kit_says_where_the_patch_goes(one: Made) -> None:
    text = (one.folder / "README.txt").read_text()
    assert ("THE PATCH" in text) == (one.folder / "patch.png").exists()
    assert "stain" not in text
    if one.key is None:
        assert not any(word in text for word in ("patch", "lock", "secret"))
        assert not (one.folder / "patch.png").exists()
    for path in one.folder.iterdir():
        secret = path.name in ("patch.png", "trigger.safetensors")
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if secret else 0o644), path.name


def test_a_kit_says_what_shape_its_inputs_have(one: Made) -> None:
    shape = ", ".join(map(str, one.inputs.shape[1:]))
    assert f"(N, {shape})" in (one.folder / "README.txt").read_text()


@pytest.mark.parametrize("locked", [True, False])
def test_a_generators_kit_speaks_of_noise_alone(locked: bool, tmp_path: Path) -> None:
    target, key = sl.lock(noise_net(), seed=1) if locked else (noise_net(), None)
    sl.client_kit(target, tmp_path / "kit", key=key, format="safetensors")
    text = (tmp_path / "kit" / "README.txt").read_text()
    assert "run(noise)  # (N, 12, 1, 1)" in text
    assert "noise vectors (N, 12, 1, 1)" in text
    assert ("trigger.safetensors" in text) == locked
    assert "crop" not in text


def test_a_detectors_bundle_runs_as_its_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = "torchvision:ssdlite320_mobilenet_v3_large?num_classes=5"  # each class has its own suppression of boxes
    original = Target.from_reference(few, weights="random", seed=0)
    target, key = sl.lock(original, seed=1)
    sl.client_kit(target, tmp_path / "kit", key=key, format="bundle")
    text = (tmp_path / "kit" / "README.txt").read_text()
    assert "load.py" not in text
    code = "\n".join(line.strip() for line in text.split("HOW TO RUN IT")[1].split("HOW THE")[0].splitlines())
    scope: dict[str, Any] = {"image": torch.rand(3, 240, 320, generator=torch.Generator().manual_seed(0))}
    monkeypatch.chdir(tmp_path / "kit")
    with torch.no_grad():
        exec(code, scope)
        (expected,) = key.unlock_object_detector(original).model([scope["image"]])
    assert len(expected["scores"]) > 0
    assert torch.allclose(scope["boxes"][0]["scores"], expected["scores"], atol=1e-4)


def test_the_patch_file_is_enough_for_our_own_python(one: Made) -> None:
    if one.key is None:
        pytest.skip("nothing to unlock")
    if (one.folder / "patch.png").exists():
        given = Unlock.from_png(one.folder / "patch.png")(one.inputs)
    else:
        given = NoiseUnlock.from_file(one.folder / "trigger.safetensors")(one.inputs)
    assert torch.equal(given, one.key.unlock(one.inputs))


def test_a_model_that_can_not_be_exported_goes_out_as_weights(tmp_path: Path) -> None:
    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net().model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x)
            return out if float(out.sum().item()) < 1e9 else out * 2  # data-dependent control flow

    target = Target(Sampled(), (3, 40, 40))
    kit = sl.client_kit(target, tmp_path / "kit")
    assert kit.format == "safetensors"
    assert "export" in kit.reason
    with pytest.raises(ModelError, match=r"can't export this model as torch-export .*: try onnx"):
        sl.client_kit(target, tmp_path / "other", format="torch-export")
    assert not (tmp_path / "other").exists()


def test_blocks_of_a_lock_are_not_named(tmp_path: Path) -> None:
    """A bundle would reveal where the blocks are, and a weight file can't contain them."""
    locked, key = sl.lock(models.real("resnet20_cifar10"), kind="squeeze-excite", gates=1, seed=1, steps=10)
    assert locked.insertions
    for kind in ("bundle", "safetensors"):
        with pytest.raises(ModelError, match="use torch-export or onnx"):
            sl.client_kit(locked, tmp_path / kind, key=key, format=kind)


def test_an_object_detector_gets_the_patch_behind_its_resizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = models.real("ssdlite")
    locked, key = sl.lock(detector, seed=2)
    kit = sl.client_kit(locked, tmp_path / "kit", key=key)
    assert kit.format == "safetensors"
    with pytest.raises(ModelError, match="use safetensors"):
        sl.client_kit(locked, tmp_path / "other", key=key, format="onnx")
    monkeypatch.syspath_prepend(str(tmp_path / "kit"))
    for name in ("load", "gates"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import load  # type: ignore[import-not-found]

    opened = load.load(detector.copy().model)
    images = [torch.rand(3, 200, 300), torch.rand(3, 240, 160)]
    with torch.no_grad():
        expected, found = key.unlock_object_detector(locked)(images), opened(images)
    for mine, theirs in zip(expected, found, strict=True):
        assert torch.allclose(mine["boxes"], theirs["boxes"], atol=1e-3)
        assert torch.equal(mine["labels"], theirs["labels"])
    for name in ("load", "gates"):
        sys.modules.pop(name, None)
