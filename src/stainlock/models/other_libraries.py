"""Models of Hugging Face transformers, segmentation_models_pytorch and ultralytics, with their preprocessing.

A folder or file may come from a stranger. No code that it names is run, nothing is downloaded, and nothing is unpickled
but tensors and classes of ultralytics' and PyTorch's own layers.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stainlock.errors import FileError, ModelError
from stainlock.storage.files import read_json
from stainlock.storage.weights import one_line
from stainlock.target import IMAGENET_MEAN, IMAGENET_STD, Target

_DEFAULT_SIZE, _YOLO_SIZE = 224, 640
_YOLO_TASKS = {
    "detect": "DetectionModel", "segment": "SegmentationModel", "classify": "ClassificationModel",
    "pose": "PoseModel", "obb": "OBBModel",
}  # fmt: skip
# ultralytics evaluates a YAML file's activation as Python.
_PLAIN_ACTIVATION = re.compile(r"(torch\.)?nn\.[A-Za-z0-9]+\([A-Za-z0-9_=., -]*\)")


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def hf_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    """``hf:DIR``: a folder of `save_pretrained`, with the model's config, its weights and its image processor's."""
    folder = Path(name)
    if arguments:
        raise ModelError(f"{reference}: expected hf:DIR without arguments: the folder's config.json has them")
    config = _config(folder, "config.json")
    if "auto_map" in config:
        raise ModelError(
            f"{folder} names code of its own (auto_map in config.json), which is never run: build the model in a"
            " FILE.py:FACTORY"
        )
    transformers = _imported("transformers", "stainlock[hf]")
    architecture = str((config.get("architectures") or ["none"])[0])
    cls = getattr(transformers, architecture, None)
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise ModelError(f"{folder} is of an architecture {architecture!r} that this transformers does not have")
    first_input = getattr(cls, "main_input_name", "nothing")
    if first_input != "pixel_values":
        raise ModelError(f"expected a vision model, {architecture} of {folder} takes {first_input} first")
    processor = _config(folder, "preprocessor_config.json")
    if pretrained and not any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        raise FileError(
            f"{folder} has no model.safetensors: expected what save_pretrained writes; pickled weights"
            " (pytorch_model.bin) are not read"
        )
    with _failures_told(reference), _quiet("transformers"), _without_bars(transformers.utils.logging):
        built = _hf_model(transformers, cls, folder, pretrained)
    channels = int(config.get("num_channels", 3))
    mean, std = _statistics(processor)
    high = 255.0 if processor.get("do_rescale") is False else 1.0
    return Target(built, (channels, *_hf_size(processor, config, folder)), mean, std, (0.0, high))


def _hf_model(transformers: Any, cls: Any, folder: Path, pretrained: bool) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "use_pretrained_backbone", False):
        config.use_pretrained_backbone = False  # otherwise downloaded
    if not pretrained:
        model: nn.Module = cls(config)
        return model
    model, found = cls.from_pretrained(
        folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"its weights lack {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    return model


def _config(folder: Path, file: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileError(f"{folder} is no folder: expected one that save_pretrained wrote")
    if not (folder / file).is_file():
        what = "its image processor's save_pretrained" if file.startswith("pre") else "save_pretrained"
        raise FileError(f"{folder} has no {file}: expected what {what} writes")
    facts = read_json(folder / file, "configuration")
    if not isinstance(facts, dict):
        raise FileError(f"{folder / file} is damaged: expected an object")
    return facts


def _statistics(processor: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if processor.get("do_normalize") is False:
        return (0.0,), (1.0,)
    mean, std = (tuple(processor.get(f"image_{name}") or default) for name, default in
                 (("mean", IMAGENET_MEAN), ("std", IMAGENET_STD)))  # fmt: skip
    return mean, std


def _hf_size(processor: dict[str, Any], config: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Rows and columns: of the crop where there is one, else what images are resized to."""
    cropped = processor.get("crop_size") if processor.get("do_center_crop") else None
    size = cropped or processor.get("size") or config.get("image_size") or _DEFAULT_SIZE
    if isinstance(size, dict):
        edge = size.get("shortest_edge") or size.get("longest_edge")
        size = [size.get("height", edge), size.get("width", edge)]
    numbers = list(size) if isinstance(size, list) else [size, size]
    if len(numbers) != 2 or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise FileError(f"{folder / 'preprocessor_config.json'} has no size of images: expected height and width")
    return numbers[0], numbers[1]


# --- segmentation_models_pytorch --------------------------------------------------------------------------------------


def smp_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    """``smp:NAME?encoder_name=resnet34&classes=2``: any architecture and encoder of the library."""
    if pretrained:
        raise ModelError(f"{reference}: the library has no weights of whole models: pass --weights FILE or random")
    smp = _imported("segmentation_models_pytorch", "stainlock[smp]")
    size = arguments.pop("image_size", _DEFAULT_SIZE)
    sides = tuple(size) if isinstance(size, list) else (size, size)
    known = list(getattr(smp, "MODEL_ARCHITECTURES_MAPPING", {}))
    if known and name.lower() not in known:
        raise ModelError(f"smp has no model {name!r}: it has {', '.join(known)}")
    with _failures_told(reference):
        model = smp.create_model(name, **{"encoder_name": "resnet34", **arguments, "encoder_weights": None})
    return Target(model, (arguments.get("in_channels", 3), *sides))


# --- ultralytics ------------------------------------------------------------------------------------------------------


def ultralytics_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    """``ultralytics:FILE.pt``, or ``ultralytics:NAME.yaml`` with ``--weights``: a YOLO for any of its tasks."""
    os.environ.setdefault("YOLO_VERBOSE", "False")  # read on import; it would print to our standard output
    tasks = _imported("ultralytics.nn.tasks", "stainlock[ultralytics]")
    size = arguments.pop("image_size", None)
    with _failures_told(reference), _quiet("ultralytics"):
        if name.endswith(".pt"):
            model = _pickled_layers(Path(name), tasks)
        elif name.endswith((".yaml", ".yml")):
            if pretrained:
                raise ModelError("a YAML file has no weights: pass --weights FILE or random")
            config = _yolo_config(Path(name), tasks)
            model = getattr(tasks, _YOLO_TASKS[tasks.guess_model_task(config)])(config, verbose=False, **arguments)
        else:
            raise ModelError("expected ultralytics:FILE.pt or ultralytics:NAME.yaml")
    model = model.float().eval()
    trained = getattr(model, "args", {})
    usual = trained.get("imgsz") if isinstance(trained, dict) else getattr(trained, "imgsz", None)
    if size is None:
        size = usual or (_DEFAULT_SIZE if type(model).__name__ == "ClassificationModel" else _YOLO_SIZE)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    channels = int(getattr(model, "yaml", {}).get("channels", getattr(model, "yaml", {}).get("ch", 3)))
    return Target(model, (channels, *sides), (0.0,), (1.0,))


def _yolo_config(path: Path, tasks: Any) -> dict[str, Any]:
    if not path.is_file() and path.name != str(path):
        raise FileError(f"{path} does not exist")
    config: dict[str, Any] = tasks.yaml_model_load(path)
    activation = config.get("activation")
    if activation is not None and not _PLAIN_ACTIVATION.fullmatch(str(activation)):
        raise ModelError(f"its activation is Python code, which is not run: expected one like nn.SiLU(), got"
                         f" {str(activation)[:60]!r}")  # fmt: skip
    return config


def _pickled_layers(path: Path, tasks: Any) -> nn.Module:
    """The module in a checkpoint. Its file is a pickle: only tensors and known layers are taken from it."""
    if not path.is_file():
        raise FileError(f"{path} does not exist")
    modules = [tasks, import_module("ultralytics.nn.modules"), nn]
    inner = [
        import_module(f"ultralytics.nn.modules.{name}") for name in ("block", "conv", "head", "transformer", "utils")
    ]
    known = {
        v for m in (*modules, *inner) for v in vars(m).values() if isinstance(v, type) and issubclass(v, nn.Module)
    }
    plain = [import_module("ultralytics.utils").IterableSimpleNamespace]
    try:
        with torch.serialization.safe_globals([*known, *plain]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise FileError(f"{path} can't be read without running code of its own: {one_line(error)}") from error
    model = (found.get("ema") or found.get("model")) if isinstance(found, dict) else None
    if not isinstance(model, nn.Module):
        raise FileError(f"{path} holds no model: expected a checkpoint that ultralytics wrote")
    return model


# --- shared -----------------------------------------------------------------------------------------------------------


def _imported(module: str, install: str) -> Any:
    library = module.partition(".")[0]
    try:
        with redirect_stdout(sys.stderr):  # ultralytics greets whoever imports it first
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise ModelError(f"{library} can't be imported ({error}): pip install {error.name}") from error
        raise ModelError(f"these models need {library}, which is not installed: pip install {install}") from error


@contextmanager
def _failures_told(reference: str) -> Iterator[None]:
    try:
        yield
    except FileError:
        raise
    except Exception as error:
        raise ModelError(f"{reference} can't be built: {one_line(error)}") from error


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _without_bars(logging: Any) -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
