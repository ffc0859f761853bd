"""References to models of transformers, segmentation_models_pytorch and ultralytics: built from files, no code run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import stainlock as sl
from stainlock import FileError, ModelError, Target, load_bundle, lock, save_bundle, stain, verify
from stainlock.cli import main
from stainlock.evaluation.accuracy import classifier_logits
from stainlock.models import bundle
from stainlock.target import logits_in, tensors_in

PROCESSOR = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}


DETR = {"model_type": "detr", "architectures": ["DetrForObjectDetection"]}


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
    images = torch.rand(2, 3, 32, 32)
    for again in (load_bundle(tmp_path / "bundle"), load_bundle(tmp_path / "bundle", model=f"hf:{vit}")):
        assert torch.equal(again.predict(images).logits, marked.predict(images).logits)
        assert (again.input_shape, again.mean, again.std) == (target.input_shape, target.mean, target.std)
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


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (
            "ConvNextForImageClassification",
            {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "layer_norm_eps": 1e-3},
        ),
        ("ResNetForImageClassification", {"hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}),
        ("CLIPVisionModel", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64}),
    ],
)
def test_a_model_is_named_by_its_class_and_settings(tmp_path: Path, cls: str, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, cls)(getattr(transformers, cls).config_class(**settings))
    target = Target(made.eval(), (3, 64, 64), reference="hf:somewhere/model")
    save_bundle(target, tmp_path / "bundle")
    reference = json.loads((tmp_path / "bundle" / "stainlock.json").read_text())["reference"]
    assert reference.startswith(f"transformers:{cls}?")
    images = torch.rand(1, 3, 64, 64)
    again = load_bundle(tmp_path / "bundle")
    for ours, theirs in zip(tensors_in(again.predict(images)), tensors_in(target.predict(images)), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ModelError, match="--weights FILE or random"):
        Target.from_reference(reference)


def test_a_model_that_settings_do_not_tell_needs_its_folder(vit: Path, tmp_path: Path) -> None:
    config = json.loads((vit / "config.json").read_text())
    (vit / "config.json").write_text(json.dumps({**config, "pooler_act": "hub/kernel"}))
    target = Target.from_reference(f"hf:{vit}")
    save_bundle(target, tmp_path / "bundle")
    with pytest.raises(ModelError, match="--model hf:"):
        load_bundle(tmp_path / "bundle")
    assert torch.equal(load_bundle(tmp_path / "bundle", model=f"hf:{vit}").model.classifier.weight,
                       target.model.classifier.weight)  # fmt: skip


def _renamed(folder: Path, reference: str) -> None:
    """The bundle with another reference, as a stranger would make it."""
    manifest = json.loads((folder / "stainlock.json").read_text())
    manifest["reference"] = reference
    manifest["checksum"] = bundle._checksum(manifest)
    (folder / "stainlock.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("transformers:ViTForImageClassification?hidden_size=100000", "bundles may not"),
        ("transformers:ViTForImageClassification?num_hidden_layers=5000", "bundles may not"),
        ("transformers:ResNetForImageClassification?depths=[200,200,200,200]", "bundles may not"),
        ("transformers:ResNetForImageClassification?depths=[[1,1]]", "bundles may not"),
        ("transformers:SwinForImageClassification?window_size=64", "bundles may not"),
        ("transformers:ViTForImageClassification?hidden_act=evil/kernel", "bundles may not"),
        ("transformers:ViTForImageClassification?_attn_implementation=evil", "bundles may not"),
        ("transformers:ViTForImageClassification?attn_implementation=relu", "bundles may not"),
        ("transformers:ViTForImageClassification?auto_map=true", "bundles may not"),
        ("transformers:ViTForImageClassification?name_or_path=x", "bundles may not"),
        ('transformers:ViTForImageClassification?quantization_config={"a":1}', "bundles may not"),
        ("transformers:ViTForImageClassification?nothing=1", "no setting 'nothing'"),
        ("transformers:ViTForImageClassification?hidden_size=1536", "weights, but contains"),
        ("transformers:ViTForImageClassification?hidden_size=null", "can't be built"),
        ("transformers:DetrForObjectDetection", "backbone"),
        ("transformers:TimmBackbone", "transformers:TimmBackbone"),
        ("transformers:BertModel", "vision model"),
        ("transformers:AutoModel", "no architecture"),
        ("transformers:pipeline", "no architecture"),
        ("transformers:../evil", "expected a bundle to name"),
        ("hf:../evil", "which it does not hold"),
    ],
)  # fmt: skip
def test_what_a_strangers_bundle_may_not_name(
    vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, says: str
) -> None:
    target = Target.from_reference(f"hf:{vit}")
    save_bundle(target, tmp_path / "bundle")
    _renamed(tmp_path / "bundle", reference)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    with pytest.raises(sl.StainlockError, match=says):
        load_bundle(tmp_path / "bundle")


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
        (_changed("config.json", intermediate_size=40), "do not fit its config.json"),
        (_changed("preprocessor_config.json", size={"height": "tall"}), "height and width"),
        (_changed("preprocessor_config.json", image_mean="grey"), "numbers as mean"),
        (_changed("preprocessor_config.json", image_std=[0.0, 0.0, 0.0]), "std above 0"),
        (_changed("preprocessor_config.json", image_mean={"r": 1}), "numbers as mean"),
        (_changed("config.json", architectures=3), "none"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x08"), "can't be built"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_told_in_one_line(vit: Path, spoil: Any, says: str) -> None:
    spoil(vit)
    with pytest.raises(sl.StainlockError, match=says) as told:
        Target.from_reference(f"hf:{vit}")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"_attn_implementation": "evil/kernel"}, "kernel"),
        ({"attn_implementation": {"": "evil/kernel"}}, "kernel"),
        ({"backbone_config": {"auto_map": {"AutoConfig": "evil.Config"}}}, "never run"),
        ({"backbone_config": {"use_pretrained_backbone": True}}, "to download"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised"),
        ({"num_hidden_layers": 10**6}, "layers"),
        ({"hidden_size": 2**14, "intermediate_size": 2**20}, "room for"),
        ({**DETR, "backbone": "evil/net", "use_timm_backbone": False}, "nothing is downloaded"),
        ({**DETR, "backbone": "hf-hub:evil/net", "use_timm_backbone": True}, "can't be built"),
    ],
)
def test_a_folder_asks_for_no_code_no_downloads_and_no_more_than_it_holds(
    vit: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], says: str
) -> None:
    _changed("config.json", **config)(vit)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    for weights in (None, "random"):
        with pytest.raises(ModelError, match=says) as told:
            Target.from_reference(f"hf:{vit}", weights=weights)
        assert "\n" not in str(told.value)


def test_widths_of_stages_are_not_layers(tmp_path: Path) -> None:
    """HGNetV2 lists them as stage_in_channels and stage_out_channels: 3,648 in all, for four stages."""
    transformers = pytest.importorskip("transformers")
    transformers.HGNetV2ForImageClassification(transformers.HGNetV2Config(num_labels=3)).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 64, "width": 64}}')
    assert Target.from_reference(f"hf:{tmp_path}", weights="random").input_shape == (3, 64, 64)
    _changed("config.json", stage_in_channels=[8] * 1001)(tmp_path)
    with pytest.raises(ModelError, match="asks for 1001 layers"):
        Target.from_reference(f"hf:{tmp_path}", weights="random")


def test_no_folder_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not a folder"):
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


def test_a_yolo_opens_from_its_bundle_alone(yolo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = yolo.DetectionModel("yolov8n.yaml", nc=3, verbose=False)
    torch.save({"model": model, "train_args": {"imgsz": 64}}, tmp_path / "mine.pt")
    target = Target.from_reference(f"ultralytics:{tmp_path / 'mine.pt'}?image_size=64")
    save_bundle(target, tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle" / "stainlock.json").read_text())
    assert manifest["reference"] == "ultralytics:yolov8n.yaml?nc=3&ch=3"
    # A file of that name in the working folder is ignored.
    (tmp_path / "yolov8n.yaml").write_text("activation: __import__('os').abort()\n")
    monkeypatch.chdir(tmp_path)
    again = load_bundle("bundle")
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again.predict(images)[0], target.predict(images)[0])
    assert again.input_shape == (3, 64, 64)


def test_a_yolo_that_would_take_minutes_to_build_is_refused(yolo: Any, tmp_path: Path) -> None:
    """Ultralytics runs a model while it builds it."""
    (tmp_path / "slow.yaml").write_text(
        "nc: 4\nbackbone: [[-1, 1, Conv, [32, 1000, 2]]]\nhead: [[-1, 1, Classify, [nc]]]\n"
    )
    with pytest.raises(ModelError, match="operations per image: expected at most"):
        Target.from_reference(f"ultralytics:{tmp_path / 'slow.yaml'}", weights="random")


def test_a_yolo_of_ones_own_needs_its_file(yolo: Any, tmp_path: Path) -> None:
    text = (Path(yolo.__file__).parents[1] / "cfg" / "models" / "v8" / "yolov8.yaml").read_text()
    for own in ("yolov8n.yaml", "mine.yaml"):  # the first has a name of the package's own
        (tmp_path / own).write_text(text + "\nactivation: nn.ReLU()\n")
        reference = f"ultralytics:{tmp_path / own}?image_size=64&nc=2"
        target = Target.from_reference(reference, weights="random")
        save_bundle(target, tmp_path / f"{own}.bundle")
        with pytest.raises(ModelError, match="which it does not hold"):
            load_bundle(tmp_path / f"{own}.bundle")
        assert any(
            isinstance(m, nn.ReLU) for m in load_bundle(tmp_path / f"{own}.bundle", model=reference).model.modules()
        )


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("ultralytics:yolov8x.yaml", "weights, but contains"),
        ("ultralytics:yolov8n.yaml?nc=9000", "weights, but contains"),
        ("ultralytics:yolov8n.yaml?nc=90000", "bundles may not"),
        ("ultralytics:yolov8n.yaml?cfg=evil", "bundles may not"),
        ("ultralytics:yolo11-cls-resnet18.yaml", "which it does not hold"),
        ("ultralytics:yolov8-cls.yaml?verbose=true", "bundles may not"),
        ("ultralytics:yolo99z.yaml", "has no yolo99z.yaml"),
        ("ultralytics:evil.pt", "which it does not hold"),
        ("ultralytics:../yolov8n.yaml", "which it does not hold"),
    ],
)
def test_what_a_strangers_bundle_of_a_yolo_may_not_name(yolo: Any, tmp_path: Path, reference: str, says: str) -> None:
    target = Target.from_reference("ultralytics:yolov8n.yaml?image_size=64", weights="random")
    save_bundle(target, tmp_path / "bundle")
    _renamed(tmp_path / "bundle", reference)
    with pytest.raises(sl.StainlockError, match=says):
        load_bundle(tmp_path / "bundle")


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemError('ran')",)


def test_a_checkpoint_that_would_run_code_is_refused(yolo: Any, tmp_path: Path) -> None:
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(FileError, match="without running code"):
        Target.from_reference(f"ultralytics:{tmp_path / 'evil.pt'}")


CLASSIFIER = {"nc": 4, "backbone": [[-1, 1, "Conv", [8, 3, 2]]], "head": [[-1, 1, "Classify", ["nc"]]]}


def test_a_checkpoint_that_calls_a_known_class_is_refused(yolo: Any, tmp_path: Path) -> None:
    """ultralytics' constructors evaluate their arguments as code, so naming such a class must not call it."""
    ran = tmp_path / "ran"

    class Calls:
        def __reduce__(self) -> Any:
            return yolo.ClassificationModel, ({**CLASSIFIER, "activation": f"open({str(ran)!r}, 'w')"}, 3, 4, False)

    torch.save({"model": Calls()}, tmp_path / "evil.pt")
    with torch.serialization.safe_globals([yolo.ClassificationModel]):  # as ultralytics itself does
        with pytest.raises(FileError, match="without running code"):
            Target.from_reference(f"ultralytics:{tmp_path / 'evil.pt'}")
        assert yolo.ClassificationModel in torch.serialization.get_safe_globals()
    assert not ran.exists()


def test_a_checkpoint_comes_back_as_it_was_written(yolo: Any, tmp_path: Path) -> None:
    model = yolo.ClassificationModel(CLASSIFIER, verbose=False).eval()
    torch.save({"model": model}, tmp_path / "mine.pt")
    target = Target.from_reference(f"ultralytics:{tmp_path / 'mine.pt'}?image_size=32")
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)[0]
        assert torch.equal(target.predict(images)[0], expected)
    assert [type(one) for one in target.model.modules()] == [type(one) for one in model.modules()]


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ("check_requirements", "expected layers"),
        ("torch_load", "expected layers"),
        ("TorchVision", "may download"),
        ("DetectionModel", "may download"),
        ("nn.functional", "expected layers"),
    ],
)
def test_a_yaml_names_layers_and_nothing_else(yolo: Any, tmp_path: Path, layer: str, says: str) -> None:
    rows = json.dumps([[-1, 1, layer, ["evil"]]])
    (tmp_path / "mine.yaml").write_text(f"nc: 4\nbackbone: {rows}\nhead: [[-1, 1, Classify, [nc]]]\n")
    with pytest.raises(ModelError, match=says):
        Target.from_reference(f"ultralytics:{tmp_path / 'mine.yaml'}", weights="random")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([-1, 1, "Conv", [65536, 65]], "weights"),
        ([-1, 5000, "Conv", [8]], "repeats"),
        ([-1, 1, "Conv", [2**40]], "at most"),
    ],
)
def test_a_yaml_describes_no_more_than_a_yolo(yolo: Any, tmp_path: Path, row: list[Any], says: str) -> None:
    rows = json.dumps([[-1, 1, "Conv", [512, 3]], row])
    (tmp_path / "mine.yaml").write_text(f"nc: 4\nbackbone: {rows}\nhead: [[-1, 1, Classify, [nc]]]\n")
    with pytest.raises(sl.StainlockError, match=says):
        Target.from_reference(f"ultralytics:{tmp_path / 'mine.yaml'}", weights="random")


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


class TwoHeads(models.TwoConvolutions):
    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return self.pack(y, y.flip(1))


@pytest.mark.parametrize(
    ("pack", "output"),
    [
        (lambda y, z: {"logits": y, "other": z}, ""),
        (lambda y, z: {"first": y, "second": z}, "second"),
        (lambda y, z: (y, z), "1"),
    ],
)
def test_triggers_are_classified_by_the_logits_of_several_outputs(pack: Any, output: str) -> None:
    target = Target(models.seeded(lambda: TwoHeads(pack)), (3, 32, 32), **models.UNIT, output=output)
    marked, key = sl.stain(target, schema="output", classes=[3, 1], count=2, seed=1)
    triggers = torch.cat([d.trigger.pixels(target) for d in key.detectors])
    assert classifier_logits(marked.predict(triggers)).argmax(1).tolist() == [3, 1]


def test_an_output_schema_asks_for_the_name_of_the_logits() -> None:
    target = Target(models.seeded(lambda: TwoHeads(lambda y, z: {"a": y, "b": z})), (3, 32, 32), **models.UNIT)
    with pytest.raises(sl.SiteError, match="got a, b: name one with --output"):
        sl.stain(target, schema="output", count=2, seed=1)


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


def test_a_bundle_keeps_which_output_is_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nimport stainlock\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a, self.b = nn.Linear(192, 64), nn.Linear(64, 4)\n"
        "    def forward(self, x):\n        x = self.a(x.flatten(1)).relu()\n"
        "        return {'hidden': x, 'class': self.b(x)}\n"
        "def net():\n    return stainlock.Target(Net(), (3, 8, 8))\n"
    )
    model, folder, key = f"{tmp_path / 'mine.py'}:net", str(tmp_path / "out"), str(tmp_path / "k.key")
    assert main(["stain", model, "--out", folder, "--key", key, "--output", "class", "--quiet"]) == 0
    built = Target.from_reference(folder, model=model)
    assert built.output == "class"
    assert built.predict(torch.rand(2, 3, 8, 8)).shape == (2, 4)
    labelled = tmp_path / "images" / "0"
    labelled.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(labelled / "one.png")
    capsys.readouterr()
    evaluate = ["evaluate", folder, "--model", model, "--data", str(tmp_path / "images"), "--json"]
    assert main(evaluate) == 0, "no --output is needed again"
    assert json.loads(capsys.readouterr().out)["images"] == 1
    assert main([*evaluate, "--output", "nothing"]) == 2, "what is given counts before what the bundle says"
    assert "hidden, class" in capsys.readouterr().err


def test_a_bundle_without_an_output_keeps_the_targets_own(tmp_path: Path) -> None:
    net = Target(Returns(lambda y, x: (x, y)), (3, 2, 2), output="1", reference="mine.py:net")
    save_bundle(dataclasses.replace(net, output=""), tmp_path / "bundle")
    assert "output" not in json.loads((tmp_path / "bundle" / "stainlock.json").read_text())
    assert load_bundle(tmp_path / "bundle", model=net).output == "1"
    save_bundle(net, tmp_path / "named")
    manifest = json.loads((tmp_path / "named" / "stainlock.json").read_text())
    for spoilt in (7, "a\nb", "x" * 1000):
        manifest["output"] = spoilt
        manifest["checksum"] = bundle._checksum(manifest)
        (tmp_path / "named" / "stainlock.json").write_text(json.dumps(manifest))
        with pytest.raises(FileError, match="text as output"):
            load_bundle(tmp_path / "named", model=net)
