"""References to models of transformers, segmentation_models_pytorch and ultralytics: built from files, no code run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import stainlock as sl
from stainlock import FileError, ModelError, Target, load_bundle, lock, save_bundle, stain, verify
from stainlock.cli import main
from stainlock.evaluation.accuracy import classifier_logits
from stainlock.tensors import logits_in

PROCESSOR = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    folder = tmp_path / "vit"
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def test_a_folder_of_hugging_face_is_stained_locked_and_verified(vit: Path, tmp_path: Path) -> None:
    target = Target.from_reference(f"hf:{vit}")
    assert (target.input_shape, target.mean, target.std) == ((3, 32, 32), (0.5,) * 3, (0.25,) * 3)
    marked, key = stain(target, seed=0)
    assert verify(marked, key, method="weights").stained
    assert not verify(target, key, method="weights").stained
    save_bundle(marked, tmp_path / "bundle")
    manifest = (tmp_path / "bundle" / "stainlock.json").read_text()
    assert str(tmp_path) not in manifest, "where the folder lies is no one's business"
    with pytest.raises(ModelError, match="--model hf:"):
        load_bundle(tmp_path / "bundle")
    again = load_bundle(tmp_path / "bundle", model=f"hf:{vit}")
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(again.predict(images).logits, marked.predict(images).logits)
    locked, opens = lock(target, seed=0)
    # The patch covers a part of the image in both.
    unlocked = locked(opens.unlock(images)).logits
    assert torch.allclose(unlocked, target(opens.unlock(images)).logits, atol=1e-4)
    assert not torch.allclose(locked.predict(images).logits, target.predict(images).logits, atol=1e-2)


def test_random_weights_and_a_weight_file_go_into_the_folders_architecture(vit: Path) -> None:
    random = Target.from_reference(f"hf:{vit}", weights="random", seed=3)
    own = Target.from_reference(f"hf:{vit}")
    save_file(own.model.state_dict(), vit / "other.safetensors")
    given = Target.from_reference(f"hf:{vit}", weights=vit / "other.safetensors")
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(own.predict(images).logits, given.predict(images).logits)
    assert not torch.equal(own.predict(images).logits, random.predict(images).logits)


def test_a_folder_with_code_of_its_own_is_refused(vit: Path) -> None:
    marker = vit / "was_run"
    (vit / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((vit / "config.json").read_text())
    (vit / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(ModelError, match="never run"):
        Target.from_reference(f"hf:{vit}")
    assert not marker.exists()


def _changed(file: str, **facts: Any) -> Any:
    def change(folder: Path) -> None:
        own = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**own, **facts}))

    return change


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "no model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "preprocessor_config.json").unlink(), "no preprocessor_config.json"),
        (lambda f: (f / "config.json").write_text("[1"), "config.json"),
        (_changed("config.json", architectures=["Nonesuch"]), "Nonesuch"),
        (_changed("config.json", architectures=["BertModel"]), "vision model"),
        (_changed("config.json", num_hidden_layers=3), "lack"),
        (_changed("preprocessor_config.json", size={"height": "tall"}), "height and width"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08"), "can't be built"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_told_in_one_line(vit: Path, spoil: Any, says: str) -> None:
    spoil(vit)
    with pytest.raises(sl.StainlockError, match=says) as told:
        Target.from_reference(f"hf:{vit}")
    assert "\n" not in str(told.value)


def test_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no folder"):
        Target.from_reference(f"hf:{tmp_path / 'nothing'}")


# --- segmentation_models_pytorch --------------------------------------------------------------------------------------


def test_a_segmentation_model_goes_into_a_bundle_and_back(tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    reference = "smp:Unet?encoder_name=resnet18&classes=2&image_size=64"
    target = Target.from_reference(reference, weights="random")
    marked, key = stain(target, seed=0, steps=4)
    assert verify(marked, key, method="weights").stained
    save_bundle(marked, tmp_path / "bundle")
    images = torch.rand(1, 3, 64, 64)
    assert torch.equal(load_bundle(tmp_path / "bundle").predict(images), marked.predict(images))


@pytest.mark.parametrize(
    ("reference", "weights", "says"),
    [
        ("smp:Unet", None, "--weights FILE or random"),
        ("smp:Unett", "random", "has no model"),
        ("smp:Unet?encoder_name=nothing", "random", "can't be built"),
        ("smp:Unet?encoder_weights=imagenet", "random", "--weights"),
    ],
)
def test_what_is_wrong_with_a_segmentation_model(reference: str, weights: str | None, says: str) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    with pytest.raises(ModelError, match=says):
        Target.from_reference(reference, weights=weights)


# --- ultralytics ------------------------------------------------------------------------------------------------------


@pytest.fixture
def yolo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "settings"))
    pytest.importorskip("ultralytics")
    from ultralytics.nn import tasks

    return tasks


def test_a_yolo_from_its_checkpoint(yolo: Any, tmp_path: Path) -> None:
    model = yolo.DetectionModel("yolov8n.yaml", verbose=False)
    torch.save({"model": model.half(), "ema": None, "train_args": {"imgsz": 64}}, tmp_path / "yolo.pt")
    target = Target.from_reference(f"ultralytics:{tmp_path / 'yolo.pt'}?image_size=64")
    assert target.input_shape == (3, 64, 64)
    assert target.dtype == torch.float32
    locked, key = lock(target, seed=0)
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        unlocked, plain = locked(key.unlock(images))[0], target(key.unlock(images))[0]
    assert torch.allclose(unlocked, plain, atol=1e-3 * float(plain.std()))


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemError('ran')",)


def test_a_checkpoint_that_would_run_code_is_refused(yolo: Any, tmp_path: Path) -> None:
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(FileError, match="without running code"):
        Target.from_reference(f"ultralytics:{tmp_path / 'evil.pt'}")


def test_a_yaml_that_would_run_code_is_refused(yolo: Any, tmp_path: Path) -> None:
    text = (Path(yolo.__file__).parents[1] / "cfg" / "models" / "v8" / "yolov8.yaml").read_text()
    (tmp_path / "yolov8n.yaml").write_text(text + "\nactivation: __import__('os').abort()\n")
    with pytest.raises(ModelError, match="not run"):
        Target.from_reference(f"ultralytics:{tmp_path / 'yolov8n.yaml'}", weights="random")


# --- outputs ----------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.layer, self.pack = nn.Linear(12, 4), pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.layer(x.flatten(1)), x)


@pytest.mark.parametrize(
    ("pack", "output"),
    [
        (lambda y, x: y, ""),
        (lambda y, x: {"logits": y, "pixels": x}, ""),
        (lambda y, x: {"out": y, "aux": y + 1}, ""),
        (lambda y, x: (y,), ""),
        (lambda y, x: {"a": None, "b": [y]}, ""),
        (lambda y, x: (x, y), "1"),
        (lambda y, x: {"heads": {"class": y, "box": x}}, "heads.class"),
    ],
)
def test_logits_are_found_or_named(pack: Any, output: str) -> None:
    target = Target(Returns(pack), (3, 2, 2), output=output)
    images = torch.rand(5, 3, 2, 2)
    wanted = target.model.layer(target.normalise(images).flatten(1))  # type: ignore[operator, union-attr]
    assert torch.equal(classifier_logits(target.predict(images), 5), wanted)
    assert torch.equal(logits_in(target.predict(images)), wanted)


def test_outputs_that_cant_be_told_are_listed() -> None:
    target = Target(Returns(lambda y, x: {"first": y, "second": y}), (3, 2, 2))
    with pytest.raises(ModelError, match=r"first, second.*--output"):
        classifier_logits(target.predict(torch.rand(2, 3, 2, 2)))
    with pytest.raises(ModelError, match=r"'third'.*first, second"):
        Target(target.model, (3, 2, 2), output="third").predict(torch.rand(2, 3, 2, 2))


def test_the_command_line_names_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n"
        "        y = super().forward(x.flatten(1))\n        return {'a': y, 'b': x}\n"
        "def net():\n    import stainlock\n    return stainlock.Target(Net(192, 4), (3, 8, 8))\n"
    )
    folder = tmp_path / "images" / "0"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "one.png")
    evaluate = ["evaluate", f"{tmp_path / 'mine.py'}:net", "--data", str(tmp_path / "images"), "--json"]
    assert main(evaluate) == 2
    assert "a, b: name one with --output" in capsys.readouterr().err
    assert main([*evaluate, "--output", "a"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 1
