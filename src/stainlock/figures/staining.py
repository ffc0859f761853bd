"""The paper's eight staining figures: responses with bounds, and performance before and after, by layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from stainlock.figures import stand_ins
from stainlock.figures.figure import Figure, Setup
from stainlock.figures.paper import PAPER
from stainlock.figures.stain_plots import draw_stains
from stainlock.figures.stain_work import StainWork
from stainlock.figures.stand_ins import COCO, DOWNLOAD, GENERATOR, IMAGENET


def _quick(stand_in: Setup, images: int, *layers: str, **options: Any) -> Setup:
    """Two stains per layer, in three layers unless layers are named."""
    return replace(
        stand_in, layers=layers, spread=3, detectors=2, images=images, options={**stand_in.options, **options}
    )


def _stains(
    name: str, needs: str, cost: str, full: Setup, *quick: Setup, data: str = "", kind: str = "images",
    where: str = "one at a time", measured: str = "accuracy",
) -> Figure:  # fmt: skip
    shows = (
        f"Stains that replace a neuron, in several layers, {where}: the detectors' responses to natural inputs, the"
        f" bounds on them by Theorems 1 and 2 and by this library, and {measured} before and after staining."
    )
    return Figure(
        f"stain-{name}", "stain", "Staining", shows, needs, cost, full, quick, partial(StainWork, kind=kind),
        draw_stains, PAPER[f"stain-{name}"], data, kind, needs_layers="stain",
    )  # fmt: skip


def _classifier(name: str, model: str, title: str, detectors: int, minutes: str, *quick: Setup) -> Figure:
    full = Setup(f"torchvision:{model}", "pretrained", detectors=detectors, name=title, classes="imagenet")
    cost = (
        f"{detectors} stains in each of 6 layers, 50,000 images, evaluation shared: about 1 million forward passes;"
        f" --quick: {minutes}"
    )
    return _stains(name, f"{DOWNLOAD} and {IMAGENET}", cost, full, *quick, data=IMAGENET)


def _object_detector(name: str, model: str, title: str, minutes: str, quick: Setup) -> Figure:
    full = Setup(f"torchvision:{model}", "pretrained", detectors=40, name=title)
    cost = f"40 stains in each of 6 layers, 5,000 images: 1.2 million forward passes; --quick: {minutes}"
    return _stains(name, f"{DOWNLOAD} and {COCO}", cost, full, quick, data=COCO, measured="AP and AR")


FIGURES = (
    _classifier("resnet50", "resnet50", "ResNet50", 50, "a minute",
        _quick(stand_ins.RESNET50, 40, "layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2")),
    _classifier("vgg16", "vgg16", "VGG16", 50, "half a minute",
        _quick(stand_ins.VGG16, 200, "features.7", "features.14", "features.21")),
    _object_detector("ssdlite", "ssdlite320_mobilenet_v3_large", "SSDLite", "a minute",
        _quick(stand_ins.SSDLITE, 16, "backbone.features.0.8.block.0.0", "backbone.features.0.12.block.0.0",
               "backbone.extra.0.0.0")),
    _object_detector("fasterrcnn", "fasterrcnn_resnet50_fpn_v2", "Faster R-CNN", "a minute",
        _quick(stand_ins.FASTER, 8, "backbone.body.layer1.0.conv2", "backbone.body.layer2.0.conv2")),
    _classifier("vit", "vit_b_16", "ViT-B/16", 50, "half a minute",
        _quick(stand_ins.VIT, 200, *(f"encoder.layers.encoder_layer_{i}.mlp.0" for i in (0, 2, 4)))),
    _classifier("swin", "swin_b", "Swin-B", 40, "half a minute",
        _quick(stand_ins.SWIN, 200), _quick(stand_ins.UNTRAINED_SWIN, 100)),
    _stains("dcgan", GENERATOR, "50 stains in each of 3 layers, 10,000 images each: 1.5 million images;"
            " --quick: half a minute", Setup(detectors=50, images=10_000, spread=3),
        _quick(stand_ins.DCGAN, 200, *(f"generator_deconv.{i}.0" for i in (1, 2, 3)), **stand_ins.FEATURES),
        kind="noise", where="including transposed convolutions", measured="the discriminator's loss"),
    _stains("ddpm", "a diffusion model's U-Net (--model FILE.py:FACTORY), images like those it draws (--data DIR),"
            " and Inception's weights (--feature-weights) or another feature extractor (--features)", "40 stains in"
            " each of 4 layers, 10,000 images each: 1.6 million images of 1000 forward passes; --quick: a minute",
            Setup(detectors=40, images=10_000, spread=4, options={"features": "inception", "steps": 1000}),
        _quick(stand_ins.DDPM, 200, "downs.0.conv1", "downs.0.conv2", "downs.1.conv1"),
        data="images like those the model draws", kind="diffusion", where="in the U-Net's downward blocks",
        measured="the Fréchet distance of drawn images"),
)  # fmt: skip
