"""Models of libraries by name, each with its library's preprocessing."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import nn

from stainlock.errors import ModelError
from stainlock.insertion import state_size
from stainlock.models.hugging_face import hf_target, is_harmless_setting, transformers_reference, transformers_target
from stainlock.models.smp import smp_target
from stainlock.models.yolo import is_stock, stock_reference, stock_size, ultralytics_target
from stainlock.storage.values import LONGEST_NAME
from stainlock.storage.weights import one_line
from stainlock.target import IMAGENET_MEAN, IMAGENET_STD, Target

INSTALL = {"torchvision": "torchvision", "timm": "stainlock[timm]"}
# Built by name alone, so that a bundle can name them; the others need the owner's files.
_BY_NAME = ("torchvision", "timm", "smp", "transformers")
LIBRARIES = (*_BY_NAME, "hf", "ultralytics")
# Refused as arguments: weights come from --weights alone, so that nothing is downloaded unasked.
_RESERVED = {
    "weights", "weights_backbone", "pretrained", "pretrained_backbone", "checkpoint_path", "pretrained_cfg",
    "pretrained_cfg_overlay", "cache_dir", "encoder_weights",
}  # fmt: skip
_SIZE_ARGUMENTS = ("image_size", "img_size", "input_size")

# What a bundle may pass to a library: arguments that shape the model, each within bounds, and nothing that names a
# file, an address, a class or a global switch. Users who need others name the model themselves.
_FLAGS = {"zero_init_residual", "aux_logits", "aux_loss", "transform_input", "init_weights", "qkv_bias", "class_token"}
_FRACTIONS = {
    "dropout", "attention_dropout", "stochastic_depth_prob", "drop_rate", "drop_path_rate", "drop_block_rate",
    "attn_drop_rate", "proj_drop_rate", "pos_drop_rate", "patch_drop_rate", "score_thresh", "nms_thresh",
    "box_score_thresh", "box_nms_thresh", "rpn_score_thresh", "rpn_nms_thresh",
}  # fmt: skip
_NUMBERS = {
    "num_classes": (0, 50_000), "classes": (1, 50_000), "nc": (1, 10_000), "ch": (1, 64),
    "in_chans": (1, 64), "in_channels": (1, 64), "encoder_depth": (1, 6), "image_size": (1, 4096),
    "img_size": (1, 4096), "input_size": (1, 4096), "min_size": (1, 4096), "max_size": (1, 4096),
    "patch_size": (1, 256), "output_stride": (1, 32), "trainable_backbone_layers": (0, 6),
    "detections_per_img": (1, 10_000), "topk_candidates": (1, 100_000), "box_detections_per_img": (1, 10_000),
    "rpn_pre_nms_top_n_test": (1, 100_000), "rpn_post_nms_top_n_test": (1, 100_000),
}  # fmt: skip
_LISTS = ("image_size", "img_size", "input_size", "min_size")  # one number, or one per side
_USUAL_CLASSES = 1000
_LIBRARY = "the library"
# Number of frames that torchvision's video models were trained on.
_FRAMES = 16
_POOLS = {"", "avg", "max", "avgmax", "catavgmax", "fast", "token", "map"}


def build_library_model(reference: str, *, pretrained: bool) -> Target:
    """The target of ``torchvision:NAME?argument=value&...``, ``timm:NAME?...`` and so on."""
    library, name, query = _parts(reference)
    arguments = _parse_arguments(reference, query)
    return _BUILDERS[library](reference, name, arguments, pretrained)


def is_built_by_name(reference: str) -> bool:
    """Whether a library builds the model by name alone, without the owner's files."""
    library, name, _ = _parts(reference)
    return library in _BY_NAME or (library == "ultralytics" and is_stock(name))


def named_reference(reference: str, model: nn.Module) -> str:
    """The model by name alone if a library has it, even if it came from the owner's folder or file; else the reference
    unchanged."""
    library, name, _ = _parts(reference)
    if library == "hf":
        found = transformers_reference(model)
        return found if found is not None and len(found) <= LONGEST_NAME else reference
    if library == "ultralytics":
        found = stock_reference(model)
        return found or (f"ultralytics:./{name}" if is_stock(name) else reference)
    return reference


def _parts(reference: str) -> tuple[str, str, str]:
    """Library, name and arguments."""
    library, _, rest = reference.partition(":")
    name, _, query = rest.partition("?")
    return library, name, query


def check_bundled_reference(reference: str, most: int) -> None:
    """Refuse a library's model that a bundle may not ask for: bundles may come from strangers.

    ``most`` is the number of values in the bundle's weights: a larger model can't be theirs, and is never built.
    """
    library, name, query = _parts(reference)
    if not is_built_by_name(reference) or not all(c.isascii() and (c.isalnum() or c in "_.-") for c in name):
        raise ModelError(f"expected a bundle to name {' or '.join(f'{known}:NAME' for known in _BY_NAME)},"
                         f" got {reference!r}")  # fmt: skip
    arguments = _parse_arguments(reference, query)
    for argument, value in arguments.items():
        if not (is_harmless_setting if library == "transformers" else _is_harmless)(argument, value):
            raise ModelError(
                f"the bundle asks for {library}:{name} with {argument}={value!r}, which bundles may not:"
                " name the model yourself with --model (in Python model=)"
            )
    size = _size_without_memory(reference)
    if size is None:
        known = (arguments.keys() & _NUMBERS.keys()) - {"num_classes"}
        if known or arguments.get("num_classes", 0) > _USUAL_CLASSES:
            raise ModelError(f"{reference} can't be measured before it is built: name the model yourself with --model"
                             " (in Python model=)")  # fmt: skip
    elif size > most:
        raise ModelError(f"the bundle asks for {reference}, which has {size} weights, but contains {most}: expected"
                         " the model that its weights belong to")  # fmt: skip


def _size_without_memory(reference: str) -> int | None:
    """Number of values in a library's model, counted on PyTorch's meta device; None if it can't be built there."""
    library, name, query = _parts(reference)
    if library == "ultralytics":
        return stock_size(name, _parse_arguments(reference, query))
    try:
        with torch.device("meta"):
            return state_size(build_library_model(reference, pretrained=False).model)
    except ModelError as error:
        if isinstance(error.__cause__, NotImplementedError):
            return None
        raise


def _is_harmless(argument: str, value: Any) -> bool:
    if argument in _FLAGS:
        return isinstance(value, bool)
    if argument == "encoder_name":
        return (
            isinstance(value, str) and bool(value) and all(c.isascii() and (c.isalnum() or c in "_.-") for c in value)
        )
    if argument == "global_pool":
        return isinstance(value, str) and value in _POOLS
    several = argument in _LISTS and isinstance(value, list) and 1 <= len(value) <= 3
    numbers: list[Any] = value if several else [value]
    if not all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers):
        return False
    if argument in _FRACTIONS:
        return bool(0 <= value <= 1)
    if argument == "width_mult":
        return bool(0.1 <= value <= 4)
    low, high = _NUMBERS.get(argument, (1, 0))
    return all(isinstance(n, int) and low <= n <= high for n in numbers)


def resize_filter(reference: str | None) -> str:
    """``"bilinear"`` or ``"bicubic"``: how the library resizes photographs for this model."""
    library, _, rest = (reference or "").partition(":")
    name = rest.partition("?")[0]
    found = "bilinear"
    if library == "torchvision":
        models = _imported("torchvision.models")
        if name in models.list_models():
            mode = getattr(models.get_model_weights(name).DEFAULT.transforms(), "interpolation", None)
            found = getattr(mode, "value", found)
    elif library == "timm":
        config = _imported("timm").get_pretrained_cfg(name, allow_unregistered=True)
        found = getattr(config, "interpolation", found)
    return "bicubic" if found == "bicubic" else "bilinear"


def _parse_arguments(reference: str, query: str) -> dict[str, Any]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise ModelError(f"expected NAME?argument=value&argument=value, got {reference}") from error
    if reserved := sorted({key for key, _ in pairs} & _RESERVED):
        raise ModelError(f"{reference}: expected no {reserved[0]} in the reference, give it with --weights")
    return {key: _parse_value(value) for key, value in pairs}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _torchvision_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    models = _imported("torchvision.models")
    _check_known(reference, name, [known for known in models.list_models() if "quantized" not in known])
    weights = models.get_model_weights(name).DEFAULT
    transforms = weights.transforms()
    kind = type(transforms).__name__
    if kind == "OpticalFlow":
        raise ModelError(
            f"{reference} takes two images, expected a model of one image or a video: protect the part that sees one,"
            " Target(model.context_encoder, (3, H, W)), and put it back"
        )
    arguments = _as_with_weights(models.get_model_builder(name), weights) | arguments
    with _failures_told(reference, pretrained):
        model = models.get_model(name, weights=weights if pretrained else None, **arguments)
    if kind == "ObjectDetection":
        if not pretrained:
            _freeze_norms(name, model)
        return _detector_target(model)
    cropped = kind in ("ImageClassification", "VideoClassification")
    size = _size(reference, arguments, transforms.crop_size if cropped else transforms.resize_size)
    frames = (max(_FRAMES, weights.meta.get("min_temporal_size", 0)),) if kind == "VideoClassification" else ()
    return Target(model, (3, *frames, *size), tuple(transforms.mean), tuple(transforms.std),
                  known_from=_LIBRARY)  # fmt: skip


def _as_with_weights(builder: Any, weights: Any) -> dict[str, Any]:
    """Arguments that torchvision sets when it loads weights, so that a reference always means one architecture."""
    name, parameters = builder.__name__, inspect.signature(builder).parameters
    changes: dict[str, Any] = {}
    if "weights_backbone" in parameters:
        changes["weights_backbone"] = None  # otherwise downloaded
    if "aux_loss" in parameters:
        changes["aux_loss"] = True
    if name.startswith("vit_"):
        changes["image_size"] = weights.meta["min_size"][0]
    if name in ("googlenet", "inception_v3"):
        changes |= {"transform_input": True, "aux_logits": True}
    return changes


def _freeze_norms(name: str, model: nn.Module) -> None:
    """Freeze batch norms, most with ε = 0, as torchvision does when it loads weights into older object detectors."""
    if not name.endswith("_fpn"):
        return
    frozen = _imported("torchvision.ops").FrozenBatchNorm2d
    eps = 0.0 if "resnet50" in name and not name.startswith("fcos") else 1e-5
    backbone: Any = model.backbone
    for path, module in list(backbone.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            parent, _, own = path.rpartition(".")
            setattr(backbone.get_submodule(parent), own, frozen(module.num_features, eps))


def _detector_target(model: nn.Module) -> Target:
    """Object detectors normalise pixels themselves; their backbone, the part that traces, gets the result."""
    transform: Any = model.transform
    size = tuple((transform.fixed_size or (transform.min_size[-1],) * 2)[::-1])  # evaluation uses the last one
    mean, std = tuple(transform.image_mean), tuple(transform.image_std)
    return Target(model, (3, *size), mean, std, part="backbone", normalises=True, known_from=_LIBRARY)


def _timm_target(reference: str, name: str, arguments: dict[str, Any], pretrained: bool) -> Target:
    timm = _imported("timm")
    _check_known(reference, name, [*timm.list_models(), *timm.list_models(pretrained=True)])
    with _failures_told(reference, pretrained):
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **arguments)
    config: dict[str, Any] = dict(getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", {}))
    channels, *size = config.get("input_size", (3, 224, 224))
    channels = arguments.get("in_chans", channels)
    mean, std = tuple(config.get("mean", IMAGENET_MEAN)), tuple(config.get("std", IMAGENET_STD))
    if len(mean) not in (1, channels):  # other than RGB: treat every channel alike
        mean, std = (sum(mean) / len(mean),), (sum(std) / len(std),)
    return Target(model, (channels, *_size(reference, arguments, size)), mean, std, known_from=_LIBRARY)


_BUILDERS: dict[str, Callable[[str, str, dict[str, Any], bool], Target]] = {
    "torchvision": _torchvision_target,
    "timm": _timm_target,
    "hf": hf_target,
    "transformers": transformers_target,
    "smp": smp_target,
    "ultralytics": ultralytics_target,
}


def _imported(module: str) -> Any:
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise ModelError(
            f"{library}: models need {library}, which is not installed: pip install {INSTALL[library]}"
        ) from error


def _check_known(reference: str, name: str, known: Iterable[str]) -> None:
    names = set(known)
    if name in names:
        return
    close = difflib.get_close_matches(name, names, n=4, cutoff=0.5)
    advice = f"did you mean {', '.join(close)}?" if close else "see the library's list_models()"
    raise ModelError(f"{reference.partition(':')[0]} has no model {name!r}: {advice}")


def _size(reference: str, arguments: dict[str, Any], default: Any) -> tuple[int, int]:
    """Height and width: from the model's arguments if given there, else the library's."""
    given = next((arguments[key] for key in _SIZE_ARGUMENTS if key in arguments), default)
    numbers = list(given) if isinstance(given, list | tuple) else [given]
    numbers = numbers[-2:] if len(numbers) == 3 else numbers
    if len(numbers) not in (1, 2) or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise ModelError(f"{reference}: expected an image size like 224 or [224, 192], got {given!r}")
    return numbers[0], numbers[-1]


@contextmanager
def _failures_told(reference: str, pretrained: bool) -> Iterator[None]:
    """Turn whatever a library raises while it builds a model into one line that says what to do."""
    logger = logging.getLogger("huggingface_hub")  # logs every retry of a download
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on training
            yield
    except Exception as error:
        advice = ""
        if pretrained:
            advice = "; pretrained weights are a download: pass --weights FILE or --weights random instead"
        raise ModelError(f"{reference} can't be built: {one_line(error)}{advice}") from error
    finally:
        logger.setLevel(level)
