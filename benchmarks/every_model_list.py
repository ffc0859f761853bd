"""The models of `every_model.py`, with random weights: of torchvision and timm one small model per family, or all of
torchvision's and three of each family of timm; of four other libraries one per architecture or a few."""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stainlock import Target
from stainlock.models.libraries import build_library_model
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
_MEMBERS = 3
_WIDTHS: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "num_labels": 10,
}  # fmt: skip
_STAGES: dict[str, Any] = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1], "num_labels": 10}
_SWIN: dict[str, Any] = {"embed_dim": 24, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8], "image_size": 64,
                         "window_size": 2, "out_features": ["stage1", "stage2", "stage3", "stage4"]}  # fmt: skip
_RESNET: dict[str, Any] = {"model_type": "resnet", "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1],
                           "embedding_size": 16, "layer_type": "basic", "out_features": ["stage4"]}  # fmt: skip
_DETR: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_labels": 10,
}  # fmt: skip
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
    "Swinv2ForImageClassification": (
        {"embed_dim": 24, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8], "image_size": 64, "window_size": 2}, 64
    ),
    "CLIPForImageClassification": ({"vision_config": {**_WIDTHS, "image_size": 64, "patch_size": 16}}, 64),
    "SiglipForImageClassification": ({"vision_config": {**_WIDTHS, "image_size": 64, "patch_size": 16}}, 64),
    "DeiTForImageClassificationWithTeacher": ({**_WIDTHS, "image_size": 64}, 64),
    "Dinov2WithRegistersForImageClassification": ({**_WIDTHS, "image_size": 56, "patch_size": 14}, 56),
    "ViTMSNForImageClassification": ({**_WIDTHS, "image_size": 64}, 64),
    "Data2VecVisionForImageClassification": ({**_WIDTHS, "image_size": 64}, 64),
    "BitForImageClassification": ({**_STAGES, "embedding_size": 32, "num_groups": 8}, 64),
    "CvtForImageClassification": (
        {"embed_dim": [16, 32, 64], "depth": [1, 2, 3], "num_heads": [1, 2, 4], "num_labels": 10,
         "stride_kv": [2, 2, 2], "stride_q": [1, 1, 1]}, 64
    ),
    "FocalNetForImageClassification": ({"embed_dim": 24, "depths": [1, 1, 2, 1], "image_size": 64}, 64),
    "HieraForImageClassification": (
        {"embed_dim": 24, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 8], "image_size": [64, 64]}, 64
    ),
    "LevitForImageClassification": (
        {"image_size": 64, "hidden_sizes": [32, 64, 96], "num_attention_heads": [2, 4, 6], "depths": [1, 1, 1],
         "key_dim": [16, 16, 16]}, 64
    ),
    "MobileViTV2ForImageClassification": ({"image_size": 64}, 64),
    "MobileNetV2ForSemanticSegmentation": ({"image_size": 64}, 64),
    "MobileViTForSemanticSegmentation": ({"image_size": 64}, 64),
    "PoolFormerForImageClassification": (_STAGES, 64),
    "PvtForImageClassification": ({"image_size": 64, **_STAGES, "num_attention_heads": [1, 2, 4, 4]}, 64),
    "SwiftFormerForImageClassification": (
        {"image_size": 64, "embed_dims": [24, 48, 64, 96], "depths": [1, 1, 2, 1]}, 64
    ),
    "HGNetV2ForImageClassification": ({}, 64),
    "TextNetForImageClassification": ({}, 64),
    "BeitForSemanticSegmentation": (
        {**_WIDTHS, "num_hidden_layers": 4, "image_size": 64, "out_indices": [1, 2, 3, 4]}, 64
    ),
    "DPTForDepthEstimation": (
        {**_WIDTHS, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "image_size": 64,
         "neck_hidden_sizes": [16, 32, 64, 64], "fusion_hidden_size": 32, "is_hybrid": False}, 64
    ),
    "GLPNForDepthEstimation": ({**_STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 32}, 64),
    "DepthAnythingForDepthEstimation": (
        {"reassemble_hidden_size": 64, "neck_hidden_sizes": [16, 32, 64, 64], "fusion_hidden_size": 32,
         "patch_size": 14,
         "backbone_config": {"model_type": "dinov2", **_WIDTHS, "num_hidden_layers": 4, "image_size": 56,
                             "patch_size": 14, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False,
                             "apply_layernorm": True}}, 56
    ),
    "DetrForObjectDetection": ({**_DETR, "backbone_config": _RESNET}, 64),
    "ConditionalDetrForObjectDetection": ({**_DETR, "backbone_config": _RESNET}, 64),
    "TableTransformerForObjectDetection": ({**_DETR, "backbone_config": _RESNET}, 64),
    "DetrForSegmentation": (
        {**_DETR, "d_model": 64, "encoder_attention_heads": 8,
         "backbone_config": {**_RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]}}, 64
    ),
    "RTDetrForObjectDetection": (
        {"d_model": 32, "encoder_hidden_dim": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
         "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_in_channels": [32, 64, 64], "decoder_in_channels": [32, 32, 32],
         "backbone_config": {"model_type": "rt_detr_resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 64],
                             "depths": [1, 1, 1, 1], "layer_type": "basic",
                             "out_features": ["stage2", "stage3", "stage4"]}}, 64
    ),
    "MaskFormerForInstanceSegmentation": (
        {"fpn_feature_size": 32, "mask_feature_size": 32, "backbone_config": {"model_type": "swin", **_SWIN},
         "decoder_config": {"model_type": "detr", **_DETR, "d_model": 32}}, 64
    ),
    "Mask2FormerForUniversalSegmentation": (
        {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 64,
         "dim_feedforward": 64, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 4, "num_queries": 10,
         "backbone_config": {"model_type": "swin", **_SWIN}}, 64
    ),
    "Swin2SRForImageSuperResolution": (
        {"image_size": 32, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}, 32
    ),
}  # fmt: skip
# Three of them at a size at which they are shipped, for `every_model_speed.py`.
SHIPPED: dict[str, tuple[dict[str, Any], int]] = {
    "ViTForImageClassification, B/16": ({}, 224),
    "SegformerForSemanticSegmentation, B0": ({}, 512),
}
YOLOS = (
    "yolo11n.yaml", "yolo11n-seg.yaml", "yolo11n-cls.yaml", "yolo11n-pose.yaml", "yolo11n-obb.yaml", "yolov8n.yaml",
    "yolov10n.yaml", "yolov5n.yaml", "yolov9t.yaml", "yolov3-tiny.yaml", "yolov6n.yaml", "yolov8n-seg.yaml",
    "yolov8n-cls.yaml", "yolo12n.yaml", "yolo26n.yaml", "yolo11s.yaml",
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
            hooks = [norm.register_forward_pre_hook(_amplify) for norm in norms]
            target.predict(synthetic_inputs(target, 4, torch.Generator().manual_seed(0)))
            for norm, hook in zip(norms, hooks, strict=True):
                hook.remove()
                norm.reset_running_stats()
            for seed in range(2):
                target.predict(synthetic_inputs(target, 4, torch.Generator().manual_seed(seed)))
    return target


def _amplify(norm: Any, given: tuple[Tensor, ...]) -> None:
    """Raise scales where ε is more than the variance. Otherwise every such norm weakens its input, and after many of
    them, as in transformers' EfficientNet with random weights, the outputs do not depend on the image."""
    values = given[0].transpose(0, 1).flatten(1)
    variance = values.var(1)
    faint = (variance < norm.eps) & (variance > 0)
    if norm.weight is not None and faint.any():
        norm.weight[faint] *= (1 + norm.eps / variance[faint]).sqrt()


def size(reference: str) -> tuple[float, float] | None:
    """Millions of parameters, and billions of multiplications for an image (in a detector's backbone), of a model of
    torchvision or timm; None if it can't be built or run. Most are counted without memory or time for them."""
    if not reference.startswith(("torchvision:", "timm:")):
        return None
    for device in ("meta", "cpu"):  # some models compute their widths with tensors of values
        with suppress(Exception), torch.device(device):
            target = build_library_model(reference, pretrained=False)
            counter = FlopCounterMode(display=False)
            with counter, evaluation_mode(target.model), torch.no_grad():
                target.run_traced(torch.empty(1, *target.input_shape))
            work = counter.get_total_flops() / 2e9  # a multiplication with its addition counts as two
            return millions(target.model), round(work, 2)
    return None


def millions(model: nn.Module) -> float:
    return round(sum(p.numel() for p in model.parameters()) / 1e6, 2)


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
            return _DIFFUSERS[name](importlib.import_module("diffusers"))
    return Target.from_reference(reference, weights="random")


def _torchvision(everything: bool) -> list[str]:
    import torchvision

    names = [n for n in torchvision.models.list_models() if "quantized" not in n]
    first = _smallest_of({n: _family(n) for n in names}, 1)
    return [*first, *(n for n in names if n not in first)] if everything else first


def _timm(everything: bool) -> list[str]:
    import timm

    modules = {name: str(timm.model_entrypoint(name).__module__) for name in timm.list_models()}
    return _smallest_of(modules, _MEMBERS if everything else 1)


def _family(name: str) -> str:
    return re.split(r"[\d_]", name)[0] + ("_det" if "rcnn" in name or "retina" in name else "")


def _smallest_of(families: dict[str, str], most: int) -> list[str]:
    """Up to this many models of every family, those whose names suggest the smallest size: first all that come first in
    their family, then all that come second. Names that begin with another word come before another size."""
    members = defaultdict(list)
    for name in sorted(families, key=_size_by_name):
        members[families[name]].append(name)
    ranks: list[list[str]] = [[] for _ in range(most)]
    for names in members.values():
        words = Counter[str]()
        turns = {}
        for name in names:
            turns[name] = words[re.split(r"[\d_]", name)[0]]
            words[re.split(r"[\d_]", name)[0]] += 1
        for rank, name in zip(ranks, sorted(names, key=lambda name: turns[name]), strict=False):
            rank.append(name)
    return [name for rank in ranks for name in sorted(rank)]


def _size_by_name(name: str) -> tuple[int, int, str]:
    return next((i for i, word in enumerate(_SMALL) if word in name), len(_SMALL)), len(name), name


def _smp(everything: bool) -> list[str]:
    names = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus",
             "UPerNet", "Segformer")  # fmt: skip
    kinds = [(name, "resnet18", 128) for name in names] + [("DPT", "tu-vit_tiny_patch16_224", 224)]
    kinds += [("Unet", encoder, 128) for encoder in
              ("mobilenet_v2", "efficientnet-b0", "vgg11_bn", "densenet121", "mit_b0", "mobileone_s0",
               "timm-skresnet18", "tu-convnext_atto")]  # fmt: skip
    kinds += [("FPN", "se_resnet50", 128), ("DeepLabV3Plus", "timm-tf_efficientnet_lite0", 128)]
    return [f"{name}?encoder_name={encoder}&classes=3&image_size={size}" for name, encoder, size in kinds]


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
    changes, size = (TRANSFORMERS | SHIPPED)[name]
    cls = getattr(transformers, name.partition(",")[0])
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.default_generator.manual_seed(0)
        transformers.utils.logging.disable_progress_bar()
        cls(cls.config_class(**changes)).save_pretrained(folder)
        facts = {"size": {"height": size, "width": size}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(facts))
        return Target.from_reference(f"hf:{folder}")


def _pixels_of(diffusers: Any, widths: tuple[int, ...], size: int, **settings: Any) -> Target:
    """A U-Net of noisy pictures and a time step, with attention in its deepest level."""
    deep = len(widths) - 1
    unet = diffusers.UNet2DModel(
        sample_size=size, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=widths,
        norm_num_groups=8, down_block_types=("DownBlock2D",) * deep + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * deep, **settings,
    )  # fmt: skip
    return Target(unet.eval(), (3, size, size), (0,), (1,), (-1, 1), extra_inputs=(torch.tensor([3]),))


def _latents_of(diffusers: Any, widths: tuple[int, ...], **settings: Any) -> Target:
    """A U-Net of noisy latents, a time step and the states of a text, which cross-attention reads."""
    deep = len(widths) - 1
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=widths,
        norm_num_groups=8, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D",) * deep + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * deep, **settings,
    )  # fmt: skip
    text = torch.rand(1, 7, 32, generator=torch.Generator().manual_seed(0))
    return Target(unet.eval(), (4, 16, 16), (0,), (1,), (-1, 1), extra_inputs=(torch.tensor(3), text))


def _codec(diffusers: Any, kind: str, **settings: Any) -> Target:
    """An encoder and decoder of pictures."""
    model = getattr(diffusers, kind)(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8, **settings,
    )  # fmt: skip
    return Target(model.eval(), (3, 32, 32), (0,), (1,), (-1, 1))


def _diffusion_transformer(diffusers: Any) -> Target:
    model = diffusers.DiTTransformer2DModel(
        sample_size=16,
        in_channels=4,
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=16,
        num_embeds_ada_norm=20,
    )
    return Target(model.eval(), (4, 16, 16), (0,), (1,), (-1, 1), extra_inputs=(torch.tensor([3]), torch.tensor([1])))


_DIFFUSERS: dict[str, Callable[[Any], Target]] = {
    "UNet2DModel": lambda library: _pixels_of(library, (32, 64), 16),
    "UNet2DModel, four levels": lambda library: _pixels_of(library, (32, 64, 64, 96), 32),
    "UNet2DModel, time steps that scale": lambda library: _pixels_of(
        library, (64, 128), 32, resnet_time_scale_shift="scale_shift"
    ),
    "UNet2DModel, as for CIFAR-10": lambda library: _pixels_of(
        library, (128, 256, 256, 256), 32, freq_shift=1, downsample_padding=0
    ),
    "UNet2DConditionModel": lambda library: _latents_of(library, (32, 64)),
    "UNet2DConditionModel, three levels": lambda library: _latents_of(library, (32, 64, 128)),
    "UNet2DConditionModel, linear projections": lambda library: _latents_of(
        library, (64, 128), use_linear_projection=True, transformer_layers_per_block=2
    ),
    "AutoencoderKL": lambda library: _codec(library, "AutoencoderKL"),
    "VQModel": lambda library: _codec(library, "VQModel", num_vq_embeddings=32),
    "DiTTransformer2DModel": _diffusion_transformer,
}
