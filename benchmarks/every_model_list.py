"""The models of `every_model.py`: one small model per family of six libraries, with random weights, or all of
torchvision's."""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stainlock import Target
from stainlock.target import evaluation_mode, synthetic_inputs

_SMALL = (
    "atto",
    "femto",
    "pico",
    "nano",
    "zepto",
    "xxs",
    "xs",
    "micro",
    "tiny",
    "_t",
    "small",
    "_s",
    "b0",
    "18",
    "26",
    "50",
)
_WIDTHS: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "num_labels": 10,
}  # fmt: skip
_STAGES: dict[str, Any] = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1], "num_labels": 10}
# Class: (changes to its default configuration, side of the images in pixels).
TRANSFORMERS: dict[str, tuple[dict[str, Any], int]] = {
    "ViTForImageClassification": ({**_WIDTHS, "image_size": 64}, 64),
    "DeiTForImageClassification": ({**_WIDTHS, "image_size": 64}, 64),
    "BeitForImageClassification": ({**_WIDTHS, "image_size": 64}, 64),
    "Dinov2ForImageClassification": ({**_WIDTHS, "image_size": 56, "patch_size": 14}, 56),
    "CLIPVisionModel": ({**_WIDTHS, "image_size": 64, "patch_size": 16}, 64),
    "SiglipVisionModel": ({**_WIDTHS, "image_size": 64, "patch_size": 16}, 64),
    "SwinForImageClassification": (
        {"embed_dim": 24, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8], "image_size": 64, "window_size": 2}, 64
    ),
    "ConvNextForImageClassification": (_STAGES, 64),
    "ConvNextV2ForImageClassification": (_STAGES, 64),
    "ResNetForImageClassification": ({**_STAGES, "embedding_size": 16}, 64),
    "RegNetForImageClassification": ({**_STAGES, "embedding_size": 16, "groups_width": 8}, 64),
    "EfficientNetForImageClassification": (
        {"image_size": 64, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}, 64
    ),
    "MobileNetV1ForImageClassification": ({"image_size": 64}, 64),
    "MobileNetV2ForImageClassification": ({"image_size": 64}, 64),
    "MobileViTForImageClassification": ({"image_size": 64}, 64),
    "PvtV2ForImageClassification": ({"image_size": 64, **_STAGES, "num_attention_heads": [1, 2, 4, 4]}, 64),
    "SegformerForImageClassification": ({**_STAGES, "num_attention_heads": [1, 2, 2, 4]}, 64),
    "SegformerForSemanticSegmentation": (
        {**_STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 64}, 64
    ),
    "UperNetForSemanticSegmentation": ({"hidden_size": 64, "auxiliary_channels": 32}, 64),
    "DPTForSemanticSegmentation": (
        {**_WIDTHS, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "image_size": 64,
         "neck_hidden_sizes": [16, 32, 64, 64], "fusion_hidden_size": 32, "is_hybrid": False}, 64
    ),
    "YolosForObjectDetection": ({**_WIDTHS, "image_size": [64, 64], "num_detection_tokens": 10}, 64),
}  # fmt: skip
YOLOS = (
    "yolo11n.yaml", "yolo11n-seg.yaml", "yolo11n-cls.yaml", "yolo11n-pose.yaml", "yolo11n-obb.yaml", "yolov8n.yaml",
    "yolov10n.yaml", "yolov5n.yaml", "yolov9t.yaml",
)  # fmt: skip


def listed(library: str, *, everything: bool = False) -> list[str]:
    """References of a library's models, for `built`."""
    found: list[str] = _LISTS[library](everything)
    return [f"{library}:{name}" for name in found]


def built(reference: str) -> Target:
    """The model with random weights and batch-norm statistics estimated on synthetic inputs."""
    target = _built(reference)
    _fill_zeros(target.model)
    norms = [m for m in target.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms and not target.normalises:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), evaluation_mode(target.model):
            for norm in norms:
                norm.training, norm.momentum = True, None  # None: average over all batches equally
            for seed in range(2):
                target.predict(synthetic_inputs(target, 4, torch.Generator().manual_seed(seed)))
    return target


def _fill_zeros(model: nn.Module) -> None:
    """Replace zero weights by small random ones. Heads and the last layers of residual branches often start at zero, so
    the outputs would not depend on the image, as they do in any trained model."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() and not name.endswith("bias") and not parameter.detach().any():
            with torch.no_grad():
                parameter.normal_(0.0, 0.02, generator=generator)


def _built(reference: str) -> Target:
    library, _, name = reference.partition(":")
    if library == "transformers":
        return _transformer(name)
    if library == "diffusers":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return _DIFFUSERS[name]()
    return Target.from_reference(reference, weights="random")


def _torchvision(everything: bool) -> list[str]:
    import torchvision

    names = [n for n in torchvision.models.list_models() if "quantized" not in n]
    return names if everything else _smallest_of({n: _family(n) for n in names})


def _timm(everything: bool) -> list[str]:
    import timm

    return _smallest_of({name: _module(name) for name in timm.list_models()})


def _module(name: str) -> str:
    import timm

    return str(timm.model_entrypoint(name).__module__)


def _family(name: str) -> str:
    return re.split(r"[\d_]", name)[0] + ("_det" if "rcnn" in name or "retina" in name else "")


def _smallest_of(families: dict[str, str]) -> list[str]:
    """For every family, the model whose name suggests the smallest size."""
    members = defaultdict(list)
    for name, family in families.items():
        members[family].append(name)

    def size(name: str) -> tuple[int, int, str]:
        return next((i for i, word in enumerate(_SMALL) if word in name), len(_SMALL)), len(name), name

    return sorted(min(names, key=size) for names in members.values())


def _smp(everything: bool) -> list[str]:
    names = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus",
             "UPerNet", "Segformer", "DPT")  # fmt: skip
    encoders = {"DPT": "tu-vit_tiny_patch16_224"}
    return [f"{n}?encoder_name={encoders.get(n, 'resnet18')}&classes=3&image_size={224 if n == 'DPT' else 128}"
            for n in names]  # fmt: skip


def _yolo(everything: bool) -> list[str]:
    return [f"{name}?image_size=128" for name in YOLOS]


_LISTS: dict[str, Callable[[bool], list[str]]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": lambda everything: list(TRANSFORMERS),
    "smp": _smp,
    "ultralytics": _yolo,
    "diffusers": lambda everything: list(_DIFFUSERS),
}
LIBRARIES = tuple(_LISTS)


def _transformer(name: str) -> Target:
    """Save the model and load it as ``hf:DIR``."""
    transformers = importlib.import_module("transformers")
    changes, size = TRANSFORMERS[name]
    cls = getattr(transformers, name)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.default_generator.manual_seed(0)
        transformers.utils.logging.disable_progress_bar()
        cls(cls.config_class(**changes)).save_pretrained(folder)
        facts = {"size": {"height": size, "width": size}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(facts))
        return Target.from_reference(f"hf:{folder}")


def _unet(conditional: bool) -> Target:
    diffusers = importlib.import_module("diffusers")
    shape = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8}
    if not conditional:
        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        unet = diffusers.UNet2DModel(in_channels=3, out_channels=3, **blocks, **shape)
        return Target(unet.eval(), (3, 16, 16), (0,), (1,), (-1, 1), extra_inputs=(torch.tensor([3]),))
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        in_channels=4, out_channels=4, cross_attention_dim=32, attention_head_dim=8, **blocks, **shape
    )
    text = torch.rand(1, 7, 32, generator=torch.Generator().manual_seed(0))
    return Target(unet.eval(), (4, 16, 16), (0,), (1,), (-1, 1), extra_inputs=(torch.tensor(3), text))


def _autoencoder() -> Target:
    diffusers = importlib.import_module("diffusers")
    model = diffusers.AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8,
    )  # fmt: skip
    return Target(model.eval(), (3, 32, 32), (0,), (1,), (-1, 1))


_DIFFUSERS: dict[str, Callable[[], Target]] = {
    "UNet2DModel": lambda: _unet(False),
    "UNet2DConditionModel": lambda: _unet(True),
    "AutoencoderKL": _autoencoder,
}
