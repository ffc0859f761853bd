"""Bundles: they can be built anywhere, alterations are detected, and they contain no secret."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fresh
import models
import pytest
import torch
from torch import Tensor

from stainlock import FileError, Key, ModelError, StainlockError, Target, load_bundle, save_bundle, stain
from stainlock.models.bundle import _checksum

FACTORY = """
import torch
from torch import nn
from stainlock import Target
from beside import WIDTH

def make():
    conv, norm, head = nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.Linear(WIDTH * 36, 5)
    model = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), head)
    return Target(model, (3, 8, 8), mean=(0.5,), std=(0.2,))
"""


def write_factory(folder: Path) -> str:
    (folder / "project").mkdir()
    (folder / "project" / "nets.py").write_text(FACTORY)
    (folder / "project" / "beside.py").write_text("WIDTH = 24\n")
    return f"{folder / 'project' / 'nets.py'}:make"


@pytest.fixture
def factory(tmp_path: Path) -> str:
    return write_factory(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Key, Path]:
    folder = tmp_path_factory.mktemp("saved")
    target = Target.from_reference(write_factory(folder))
    models.settle(target.model)
    marked, key = stain(target, site="0", seed=3)
    save_bundle(marked, folder / "out" / "bundle")
    return marked, key, folder / "out"


@pytest.fixture
def made(saved: tuple[Target, Key, Path], factory: str, tmp_path: Path) -> tuple[Target, Key, Path]:
    """A copy of the saved files, which a test may alter; model and key are shared and must not be changed."""
    marked, key, out = saved
    shutil.copytree(out, tmp_path / "out")
    return marked, key, tmp_path / "out" / "bundle"


def test_a_bundle_is_the_model(made: tuple[Target, Key, Path], factory: str) -> None:
    marked, key, folder = made
    loaded = load_bundle(folder, model=factory)
    assert models.same_state(loaded.model, marked.model)
    assert key.matches(loaded) is None
    assert not any(m.training for m in loaded.model.modules())
    for name in ("input_shape", "mean", "std", "bounds", "part"):
        assert getattr(loaded, name) == getattr(marked, name)
    images = torch.rand(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded.predict(images), marked.predict(images))
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "stainlock.json"]
    assert not list(folder.parent.glob(".*"))


def test_a_factorys_bundle_loads_in_another_process_from_another_folder(
    made: tuple[Target, Key, Path], factory: str, tmp_path: Path
) -> None:
    _, key, folder = made
    (tmp_path / "elsewhere").mkdir()
    key.save(tmp_path / "k.key")
    script = (
        "import os, sys; from stainlock import Key, load_bundle, verify; "
        "b, k = load_bundle(sys.argv[1], model=sys.argv[3]), Key.load(sys.argv[2]); "
        "print(verify(b, k, method='weights').stained)"
    )
    done = fresh.run(script, str(folder), str(tmp_path / "k.key"), factory, folder=tmp_path / "elsewhere")
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("reference", ["nets.py:make", "../project/nets.py:make", "{absolute}"])
def test_a_bundle_says_nothing_of_the_owners_folders(
    factory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    monkeypatch.chdir(tmp_path / "project")
    save_bundle(Target.from_reference(reference.format(absolute=factory)), "../out")
    text = (tmp_path / "out" / "stainlock.json").read_text()
    assert json.loads(text)["reference"] == "nets.py:make"
    assert "project" not in text
    assert tmp_path.name not in text


def secrets_of(key: Key) -> list[bytes]:
    found = [str(key.seed).encode()]
    for detector in key.detectors:
        found += [detector.trigger.levels.numpy().tobytes(), detector.replaced.contiguous().numpy().tobytes()]
        for dtype in (torch.float64, torch.float32, torch.float16):
            found.append(detector.vector.to(dtype).numpy().tobytes())
    return found


@pytest.mark.parametrize("additive", [False, True])
def test_a_bundle_holds_no_secret(factory: str, tmp_path: Path, additive: bool) -> None:
    target = Target.from_reference(factory)
    models.settle(target.model)
    marked, key = stain(target, site="0", additive=additive, seed=2**90 + 12345)
    save_bundle(marked, tmp_path / "b")
    content = b"".join(p.read_bytes() for p in sorted((tmp_path / "b").iterdir()))
    for secret in secrets_of(key):
        assert len(secret) > 8
        assert secret not in content
    text = (tmp_path / "b" / "stainlock.json").read_text()
    for word in ("detector", "trigger", "seed", "message", "site", "channel"):
        assert word not in text


def test_altered_weights_are_told(made: tuple[Target, Key, Path]) -> None:
    folder = made[2]
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match="was altered after it was written"):
        load_bundle(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "stainlock.json"])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_truncated_bundles_are_told(made: tuple[Target, Key, Path], name: str, part: float) -> None:
    path = made[2] / name
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(FileError):
        load_bundle(made[2])
    path.unlink()
    with pytest.raises(FileError):
        load_bundle(made[2])


@pytest.mark.parametrize(
    "name", ["format", "version", "reference", "input_shape", "mean", "std", "bounds", "part", "digest"]
)
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("value", ["missing", None, "nonsense", -3, [1, 0], {}])
def test_manifests_that_make_no_sense_are_told(
    made: tuple[Target, Key, Path], factory: str, version: int, name: str, value: Any
) -> None:
    """Either one clear line or, if the fact is not needed, the same model: never another error or another model."""
    marked, _, folder = made
    path = folder / "stainlock.json"
    manifest = json.loads(path.read_text()) | {"version": version}
    if value == "missing":
        del manifest[name]
    else:
        manifest[name] = value
    path.write_text(json.dumps(sealed(manifest)))
    try:
        loaded = load_bundle(folder, model=factory)
    except StainlockError:
        pass
    else:
        assert models.same_state(loaded.model, marked.model)
        assert (loaded.input_shape, loaded.mean, loaded.std) == (marked.input_shape, marked.mean, marked.std)


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Recompute its checksum."""
    return manifest | {"checksum": _checksum(manifest)}


def test_newer_bundles_are_told(made: tuple[Target, Key, Path]) -> None:
    path = made[2] / "stainlock.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    with pytest.raises(FileError, match="has bundle version 99, this program reads"):
        load_bundle(made[2])


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"', "{}"])
def test_foreign_manifests_are_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "stainlock.json").write_text(content)
    with pytest.raises(FileError):
        load_bundle(tmp_path)


def test_targets_that_can_not_be_built_again_are_not_bundled(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be bundled: it has no reference"):
        save_bundle(models.mlp(), tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_is_never_overwritten(made: tuple[Target, Key, Path]) -> None:
    with pytest.raises(FileError, match="exists already"):
        save_bundle(made[0], made[2])


@pytest.mark.parametrize("kind", ["fp16", "bf16", "mixed", "channels last"])
def test_models_of_other_types_come_back(factory: str, tmp_path: Path, kind: str) -> None:
    target = Target.from_reference(factory)
    if kind == "channels last":
        target.model.to(memory_format=torch.channels_last)
    else:
        target.model.to(torch.bfloat16 if kind == "bf16" else torch.float16)
    if kind == "mixed":  # half precision, except for batch norm
        target.model[1].float()
    save_bundle(target, tmp_path / "b")
    assert models.same_state(load_bundle(tmp_path / "b", model=factory).model, target.model)


def test_a_librarys_model_is_built_without_a_download(tmp_path: Path) -> None:
    target = Target.from_reference("torchvision:squeezenet1_1?num_classes=7", weights="random")
    with torch.no_grad():
        target.model.classifier[1].bias.add_(1)
    save_bundle(target, tmp_path / "b")
    loaded = load_bundle(tmp_path / "b")
    assert models.same_state(loaded.model, target.model)
    images: Tensor = torch.rand(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(loaded.predict(images), target.predict(images))
