"""Model references and weight files."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stainlock.errors import FileError, ModelError, StainlockError
from stainlock.models.references import load_reference
from stainlock.storage.weights import check_finite, load_weights
from stainlock.target import IMAGENET_MEAN, IMAGENET_STD, Target

SQUEEZENET = "torchvision:squeezenet1_1"
DOWNLOAD = "torchvision.models._api.load_state_dict_from_url"


def small_model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 30 * 30, 5))


def same_state(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_one_line(error: pytest.ExceptionInfo[StainlockError]) -> None:
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500


# Library models


def test_torchvision_model_brings_its_preprocessing() -> None:
    target = load_reference(SQUEEZENET, weights="random")
    assert target.reference == SQUEEZENET
    assert target.input_shape == (3, 224, 224)
    assert (target.mean, target.std, target.bounds) == (IMAGENET_MEAN, IMAGENET_STD, (0.0, 1.0))
    assert not any(module.training for module in target.model.modules())


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, again, other = (load_reference(SQUEEZENET, weights="random", seed=s).model for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same_state(first, again)
    assert not same_state(first, other)


@pytest.mark.parametrize(
    ("reference", "shape", "mean", "part"),
    [
        ("torchvision:swin_v2_t", (3, 256, 256), IMAGENET_MEAN, ""),
        ("torchvision:ssdlite320_mobilenet_v3_large", (3, 320, 320), (0.5, 0.5, 0.5), "backbone"),
        ("torchvision:fasterrcnn_mobilenet_v3_large_320_fpn", (3, 320, 320), IMAGENET_MEAN, "backbone"),
        ("torchvision:lraspp_mobilenet_v3_large", (3, 520, 520), IMAGENET_MEAN, ""),
    ],
)
def test_preprocessing_of_other_torchvision_models(
    reference: str, shape: tuple[int, ...], mean: tuple[float, ...], part: str
) -> None:
    target = load_reference(reference, weights="random")
    assert (target.input_shape, target.mean, target.part) == (shape, mean, part)


def test_model_arguments_in_the_reference() -> None:
    target = load_reference("torchvision:resnet18?num_classes=7&zero_init_residual=true", weights="random")
    assert target.model.fc.out_features == 7
    assert float(target.model.layer1[0].bn2.weight.detach().abs().max()) == 0


def test_image_size_argument_sets_the_input_shape() -> None:
    target = load_reference("torchvision:vit_b_32?image_size=64&num_classes=3", weights="random")
    assert target.input_shape == (3, 64, 64)
    assert target.predict(torch.rand(1, 3, 64, 64)).shape == (1, 3)


def test_timm_model_brings_its_preprocessing() -> None:
    pytest.importorskip("timm")
    target = load_reference("timm:tf_efficientnet_lite0", weights="random")
    assert (target.input_shape, target.mean, target.std) == ((3, 224, 224), (0.5,) * 3, (0.5,) * 3)
    small = load_reference("timm:vit_tiny_patch16_224?img_size=32&in_chans=1&num_classes=4", weights="random")
    assert small.input_shape == (1, 32, 32)
    assert small.predict(torch.rand(2, 1, 32, 32)).shape == (2, 4)


def test_without_timm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=re.escape("pip install stainlock[timm]")):
        load_reference("timm:resnet18", weights="random")


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet", "deeplabv3_mobilenet_v3_large"])
def test_architecture_does_not_depend_on_where_weights_come_from(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = load_reference(f"torchvision:{name}", weights="random", seed=3)
    monkeypatch.setattr(DOWNLOAD, lambda *_, **__: random.model.state_dict())
    for weights in (None, "pretrained"):
        pretrained = load_reference(f"torchvision:{name}", weights=weights)
        assert same_state(random.model, pretrained.model)
        assert pretrained.input_shape == random.input_shape


def test_failed_download_says_what_to_pass_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no route\nto host")

    monkeypatch.setattr(DOWNLOAD, unreachable)
    with pytest.raises(ModelError, match=r"no route to host.*--weights FILE or --weights random") as error:
        load_reference(SQUEEZENET)
    assert_one_line(error)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("torchvision:resnet81", "did you mean resnet18"),
        ("timm:resnet_18", "did you mean .*resnet18"),
        ("torchvision:raft_small", "takes two images"),
        ("torchvision:resnet18?num_classes", "NAME\\?argument=value"),
        ("torchvision:resnet18?colour=red", "unexpected keyword argument 'colour'"),
        ("torchvision:resnet18?weights=DEFAULT", "expected no weights in the reference"),
        ("torchvision:vit_b_32?image_size=big", "can't be built"),
        ("caffe:alexnet", "expected torchvision:NAME"),
    ],
)
def test_wrong_references(reference: str, told: str) -> None:
    with pytest.raises(ModelError, match=told) as error:
        load_reference(reference, weights="random")
    assert_one_line(error)


def test_a_reference_that_is_neither_a_name_nor_a_file() -> None:
    told = r"resnet18 does not exist: expected torchvision:NAME, timm:NAME, .*FILE\.py:FACTORY, or a bundle directory"
    with pytest.raises(FileError, match=told) as error:
        load_reference("resnet18", weights="random")
    assert_one_line(error)


def test_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"not a bundle, it has no stainlock\.json"):
        load_reference(str(tmp_path))


# Factories

FACTORIES = """
import torch
from torch import nn
from stainlock import target as t
from layers import WIDTH

def module():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, WIDTH))

def whole():
    return t.Target(module(), input_shape=(3, 8, 8), mean=(0.5,), std=(0.25,), bounds=(-1, 1))

def broken(): raise RuntimeError("first\\nsecond")
def number(): return 3
def empty(): return nn.ReLU()
def poisoned():
    model = module()
    model[1].weight.data[0, 0] = float("nan")
    return model
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    (tmp_path / "layers.py").write_text("WIDTH = 6\n")
    (tmp_path / "models.py").write_text(FACTORIES)
    return tmp_path / "models.py"


def test_factory_of_a_module_and_of_a_target(factories: Path) -> None:
    module = load_reference(f"{factories}:module")
    assert module.input_shape == (3, 224, 224)
    assert not module.model.training
    whole = load_reference(f"{factories}:whole", seed=1)
    assert whole.reference == f"{factories}:whole"
    assert (whole.input_shape, whole.mean, whole.std, whole.bounds) == (
        (3, 8, 8),
        (0.5,),
        (0.25,),
        (-1.0, 1.0),
    )


def test_relative_factory_stays_relative(factories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(factories.parent)
    assert load_reference("models.py:module").reference == "models.py:module"


def test_factory_draws_from_the_seed(factories: Path) -> None:
    before = torch.random.get_rng_state()
    first, again, other = (load_reference(f"{factories}:module", seed=s).model for s in (1, 1, 2))
    assert same_state(first, again)
    assert not same_state(first, other)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_weight_file_on_top_of_a_factory(factories: Path, tmp_path: Path) -> None:
    wanted = load_reference(f"{factories}:module", seed=5).model
    save_file(wanted.state_dict(), tmp_path / "w.safetensors")
    loaded = load_reference(f"{factories}:whole", weights=tmp_path / "w.safetensors").model
    assert same_state(loaded, wanted)


def test_factories_leave_the_import_system_as_it_was(factories: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "layers.py").write_text("WIDTH = 9\n")
    (other / "models.py").write_text(FACTORIES)
    search_path = list(sys.path)
    assert load_reference(f"{factories}:module").model[1].out_features == 6
    assert load_reference(f"{other}/models.py:module").model[1].out_features == 9
    assert sys.path == search_path
    assert "layers" not in sys.modules


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent", "no function absent: it has module, whole, broken, number, empty, poisoned"),
        ("broken", r"broken\(\) of .* raised RuntimeError: first second"),
        ("number", "return an nn.Module or a Target, got int"),
        ("empty", "expected a model with parameters"),
        ("poisoned", "NaN or infinite values in 1.weight"),
    ],
)
def test_wrong_factories(factories: Path, name: str, told: str) -> None:
    with pytest.raises(ModelError, match=told) as error:
        load_reference(f"{factories}:{name}")
    assert_one_line(error)


def test_factory_file_that_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        load_reference(f"{tmp_path}/absent.py:make")
    (tmp_path / "broken.py").write_text("def make(:\n")
    with pytest.raises(ModelError, match="can't be imported, SyntaxError") as error:
        load_reference(f"{tmp_path}/broken.py:make")
    assert_one_line(error)


# Weight files


def write(path: Path, content: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".bin"])
def test_weights_come_back_from_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    wanted, model = small_model(1), small_model(2)
    load_weights(model, write(tmp_path / f"w{suffix}", wanted.state_dict()))
    assert same_state(model, wanted)


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"state_dict": s, "epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
        lambda s: {"model": {"state_dict": s}},
        lambda s: {"ema": s, "step": torch.tensor(3)},
        lambda s: {"generator_a": s, "epoch": 1},
        lambda s: prefixed(s, "module."),
        lambda s: {"net": prefixed(s, "module._orig_mod.")},
        lambda s: prefixed(s, "model."),
        lambda s: {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in s.items()},
        lambda s: {name: tensor for name, tensor in s.items() if "num_batches" not in name},
    ],
)
def test_wrapped_weights(tmp_path: Path, wrap: Any) -> None:
    wanted, model = small_model(1), small_model(2)
    load_weights(model, write(tmp_path / "w.pt", wrap(dict(wanted.state_dict()))))
    assert same_state(model, wanted)


def test_prefix_that_belongs_to_the_model_stays(tmp_path: Path) -> None:
    wanted, model = (nn.ModuleDict({"model": small_model(seed)}) for seed in (1, 2))
    load_weights(model, write(tmp_path / "w.pt", wanted.state_dict()))
    assert same_state(model, wanted)


def test_half_precision_storage_is_cast_to_the_models_dtype(tmp_path: Path) -> None:
    wanted, model = small_model(1), small_model(2)
    stored = {name: t.half() if t.is_floating_point() else t for name, t in wanted.state_dict().items()}
    load_weights(model, write(tmp_path / "w.safetensors", stored))
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight, wanted[0].weight.half().float())


def test_mismatches_are_counted_and_the_model_is_untouched(tmp_path: Path) -> None:
    model, before = small_model(1), small_model(1)
    state = small_model(2).state_dict()
    state["3.weight"] = torch.zeros(2, 2)
    state["extra"] = torch.zeros(1)
    del state["0.weight"], state["0.bias"]
    with pytest.raises(ModelError) as error:
        load_weights(model, write(tmp_path / "w.safetensors", state))
    assert_one_line(error)
    message = str(error.value)
    assert "2 missing (0.weight, 0.bias)" in message
    assert "1 unexpected (extra)" in message
    assert "1 not matching (3.weight (2, 2) where the model has (5, 3600))" in message
    assert same_state(model, before)


def test_integers_for_floats_are_refused(tmp_path: Path) -> None:
    state = small_model().state_dict() | {"0.bias": torch.zeros(4, dtype=torch.int8)}
    with pytest.raises(ModelError, match=r"0.bias torch.int8 where the model has torch.float32"):
        load_weights(small_model(), write(tmp_path / "w.safetensors", state))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_weights_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    model, before = small_model(1), small_model(1)
    state = small_model(2).state_dict()
    state[name].view(-1)[0] = value
    with pytest.raises(ModelError, match=f"NaN or infinite values in {name} .1 of"):
        load_weights(model, write(tmp_path / "w.safetensors", state))
    assert same_state(model, before)
    model.state_dict()[name].view(-1)[0] = value
    with pytest.raises(ModelError, match=name):
        check_finite(model)


def test_masks_and_bounds_may_be_infinite(tmp_path: Path) -> None:
    model = small_model()
    model.register_buffer("bound", torch.tensor(float("inf")))
    model.register_buffer("mask", torch.full((3, 3), -float("inf")).triu(1))
    check_finite(model)
    load_weights(model, write(tmp_path / "w.safetensors", model.state_dict()))
    model.register_buffer("bound", torch.tensor(float("nan")))
    with pytest.raises(ModelError, match="bound"):
        check_finite(model)


def test_overflow_in_the_models_dtype_is_found(tmp_path: Path) -> None:
    state = small_model().state_dict()
    state["0.bias"] = state["0.bias"] * 0 + 1e6
    with pytest.raises(ModelError, match=r"infinite values in 0\.bias"):
        load_weights(small_model().half(), write(tmp_path / "w.safetensors", state))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_truncated_foreign_and_empty_files(tmp_path: Path, suffix: str) -> None:
    whole = write(tmp_path / f"whole{suffix}", small_model().state_dict()).read_bytes()
    for content in (whole[: len(whole) // 2], b"GIF89a" * 100, b""):
        path = tmp_path / f"damaged{suffix}"
        path.write_bytes(content)
        with pytest.raises(FileError, match=re.escape(f"damaged{suffix}")) as error:
            load_weights(small_model(), path)
        assert_one_line(error)


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    model = load_reference(SQUEEZENET, weights="random").model
    torch.save(model, tmp_path / "whole_model.pt")
    with pytest.raises(FileError, match=r"never loaded: save model\.state_dict") as error:
        load_weights(model, tmp_path / "whole_model.pt")
    assert_one_line(error)


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], {}, torch.zeros(2)])
def test_files_without_a_state_dict(tmp_path: Path, content: Any) -> None:
    with pytest.raises(FileError, match="expected a dict of tensors"):
        load_weights(small_model(), write(tmp_path / "w.pt", content))


def test_missing_file_folder_and_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="found nothing at"):
        load_reference(SQUEEZENET, weights=str(tmp_path / "absent.pth"))
    with pytest.raises(FileError, match="found a folder at"):
        load_weights(small_model(), tmp_path)
    with zipfile.ZipFile(tmp_path / "w.zip", "w"):
        pass
    with pytest.raises(FileError, match=r"expected weights as .safetensors or .pt"):
        load_weights(small_model(), tmp_path / "w.zip")


def test_target_takes_references_too(factories: Path) -> None:
    assert isinstance(Target.from_reference(f"{factories}:whole"), Target)
