"""Models of Hugging Face transformers: ``hf:DIR``, a folder of `save_pretrained`; ``transformers:CLASS?...``, by name.

A folder may come from a stranger: no code that it names is run, nothing is downloaded, nothing is unpickled. A bundle
names a model by its class and the settings that differ from the class's defaults, if these are numbers, flags or a few
known words.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch
from torch import nn

from stainlock.errors import FileError, ModelError
from stainlock.models.building import failures_told, imported, quiet, without_bars
from stainlock.models.hf_config import LAYERS, check_config, check_size, offline
from stainlock.storage.checks import check_conventions
from stainlock.storage.records import read_json
from stainlock.storage.values import shown
from stainlock.target import IMAGENET_MEAN, IMAGENET_STD, Target

_DEFAULT_SIZE = 224
_INSTALL = "stainlock[hf]"
# Entries of a configuration that do not shape the model, or follow from the others.
_NOT_SETTINGS = {
    "architectures", "transformers_version", "model_type", "dtype", "torch_dtype", "problem_type", "id2label",
    "label2id", "stage_names", "out_features", "out_indices", "use_cache",
}  # fmt: skip
# Words that a bundle may use in settings, names of functions and blocks; others could name a file or an address.
_WORDS = {
    "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu6", "silu", "swish", "hardswish",
    "selu", "mish", "tanh", "sigmoid", "leaky_relu", "basic", "bottleneck", "x", "y", "mean", "max", "project", "add",
    "ignore",
}  # fmt: skip
# Settings with one of these in the name are never taken from a bundle: they could ask for downloads or code.
_BARRED = ("backbone", "implementation", "path", "quant", "auto", "kernels", "timm", "dtype", "torchscript", "_commit")
_MOST_LAYERS, _MOST_LISTED = 256, 64
_BOUNDS = {"image_size": 4096, "patch_size": 256, "window_size": 32}
_LARGEST = 16384


def hf_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    """``hf:DIR``: a folder of `save_pretrained` with the model's config and weights, and its image processor's."""
    folder = Path(name)
    if arguments:
        raise ModelError(f"{reference}: expected hf:DIR without arguments: the folder's config.json has them")
    config = _config(folder, "config.json")
    check_config(config, folder)
    transformers = imported("transformers", _INSTALL)
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "none"
    cls = _vision_class(transformers, architecture)
    processor = _config(folder, "preprocessor_config.json")
    if pretrained and not any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        raise FileError(
            f"{folder} has no model.safetensors: expected what save_pretrained writes; pickled weights"
            " (pytorch_model.bin) are not read"
        )
    with failures_told(reference), offline(), quiet("transformers"), without_bars(transformers.utils.logging):
        built = _hf_model(transformers, cls, folder, pretrained)
    mean, std = _statistics(processor)
    shape = (config.get("num_channels", 3), *_hf_size(processor, config, folder))
    bounds = (0.0, 255.0 if processor.get("do_rescale") is False else 1.0)
    try:
        check_conventions({"input_shape": shape, "mean": mean, "std": std, "bounds": bounds, "part": ""})
    except ValueError as error:
        raise FileError(f"{folder} describes an impossible model input: {error}") from error
    return Target(built, shape, mean, std, bounds)


def _hf_model(transformers: Any, cls: Any, folder: Path, pretrained: bool) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "use_pretrained_backbone", False):
        config.use_pretrained_backbone = False  # otherwise downloaded
    check_size(lambda: cls(config), folder)
    if not pretrained:
        model: nn.Module = cls(config)
        return model
    model, found = cls.from_pretrained(
        folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    if other := sorted(str(key[0]) for key in found["mismatched_keys"]):
        raise ModelError(f"its weights do not fit its config.json, which gives {shown(other[0])} another shape")
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"its weights lack {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    return model


def _config(folder: Path, file: str) -> dict[str, Any]:
    if not folder.is_dir():
        raise FileError(f"{folder} is not a folder: expected one that save_pretrained wrote")
    if not (folder / file).is_file():
        what = "its image processor's save_pretrained" if file.startswith("pre") else "save_pretrained"
        raise FileError(f"{folder} has no {file}: expected what {what} writes")
    facts = read_json(folder / file, "configuration")
    if not isinstance(facts, dict):
        raise FileError(f"{folder / file} is damaged: expected an object")
    return facts


def _statistics(processor: dict[str, Any]) -> tuple[Any, Any]:
    """Mean and std as in the file, unchecked; one number applies to every channel."""
    if processor.get("do_normalize") is False:
        return (0.0,), (1.0,)
    mean, std = processor.get("image_mean") or IMAGENET_MEAN, processor.get("image_std") or IMAGENET_STD
    return (mean,) if isinstance(mean, int | float) else mean, (std,) if isinstance(std, int | float) else std


def _hf_size(processor: dict[str, Any], config: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Rows and columns: of the crop if there is one, else of the resized image."""
    cropped = processor.get("crop_size") if processor.get("do_center_crop") else None
    size = cropped or processor.get("size") or config.get("image_size") or _DEFAULT_SIZE
    if isinstance(size, dict):
        edge = size.get("shortest_edge") or size.get("longest_edge")
        size = [size.get("height", edge), size.get("width", edge)]
    numbers = list(size) if isinstance(size, list) else [size, size]
    if len(numbers) != 2 or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise FileError(f"{folder / 'preprocessor_config.json'} has no size of images: expected height and width")
    return numbers[0], numbers[1]


# --- by name ----------------------------------------------------------------------------------------------------------


def transformers_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    """``transformers:CLASS?setting=value``: a vision model of the library, with the class's default configuration
    except for these settings."""
    if pretrained:
        raise ModelError(f"{reference} names an architecture: pass --weights FILE or random, or hf:DIR with its folder")
    transformers = imported("transformers", _INSTALL)
    cls = _vision_class(transformers, name)
    known = {*cls.config_class().to_dict(), "num_labels"}
    if unknown := sorted(set(arguments) - known):
        raise ModelError(f"{name} has no setting {unknown[0]!r}")
    with failures_told(reference), quiet("transformers"):
        config = cls.config_class(**arguments)
        inner = [key for key, value in config.to_dict().items() if "backbone" in key and isinstance(value, dict | str)]
        if inner:
            raise ModelError(f"its {inner[0]} is a model of its own: give the folder as hf:DIR")
        model = cls(config)
    size = getattr(config, "image_size", None)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    usable = len(sides) == 2 and all(isinstance(n, int) for n in sides)
    return Target(model, (int(getattr(config, "num_channels", 3)), *(sides if usable else (_DEFAULT_SIZE,) * 2)))


def transformers_reference(model: nn.Module) -> str | None:
    """A reference that rebuilds this architecture; None if that takes more than harmless settings."""
    config: Any = getattr(model, "config", None)
    transformers = imported("transformers", _INSTALL)
    if getattr(transformers, type(model).__name__, None) is not type(model) or config is None:
        return None
    own, usual = _settings(config), _settings(type(config)())
    settings = {key: value for key, value in own.items() if key not in usual or usual[key] != value}
    if not all(is_harmless_setting(key, value) for key, value in settings.items()):
        return None
    texts = {k: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for k, v in settings.items()}
    reference = f"transformers:{type(model).__name__}" + (f"?{urlencode(texts, safe='[],')}" if texts else "")
    try:
        with torch.device("meta"):
            again = transformers_target(reference, type(model).__name__, settings, pretrained=False).model
    except Exception:  # the library's own code may need more than these settings
        return None
    return reference if _settings(again.config) == own else None


def _settings(config: Any) -> dict[str, Any]:
    """The settings that shape the model, as JSON values."""
    listed: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    own = {key: value for key, value in listed.items() if key not in _NOT_SETTINGS and not key.startswith("_")}
    return {**own, "num_labels": len(listed.get("id2label") or ())}


def is_harmless_setting(name: str, value: Any) -> bool:
    """Whether a bundle may use this setting: a flag, numbers within bounds, or one of a few words."""
    if any(part in name for part in _BARRED) or name.startswith("_") or not name.isascii() or not name.isidentifier():
        return False
    layers = any(part in name for part in LAYERS)
    if isinstance(value, list):
        several = not any(isinstance(v, list) for v in value) and all(is_harmless_setting(name, v) for v in value)
        total = sum(v for v in value if isinstance(v, int)) if layers and several else 0
        return several and len(value) <= _MOST_LISTED and total <= _MOST_LAYERS
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, str):
        return value in _WORDS
    if isinstance(value, float):
        return math.isfinite(value) and abs(value) <= _LARGEST
    return isinstance(value, int) and -1 <= value <= (_MOST_LAYERS if layers else _BOUNDS.get(name, _LARGEST))


def _vision_class(transformers: Any, name: str) -> Any:
    cls = getattr(transformers, name, None) if name.isidentifier() else None
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise ModelError(f"this transformers has no architecture {shown(repr(name))}")
    first_input = getattr(cls, "main_input_name", "nothing")
    if first_input != "pixel_values":
        raise ModelError(f"expected a vision model, but {name} takes {first_input} first")
    return cls
