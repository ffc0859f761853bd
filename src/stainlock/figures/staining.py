"""The paper's eight staining figures: responses with bounds, and performance before and after, by layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from stainlock.figures.figure import Figure, Setup
from stainlock.figures.stain_plots import draw_stains
from stainlock.figures.stain_work import StainWork

IMAGENET = "ImageNet's validation set (50,000 images in class folders; image-net.org, after registering)"
COCO = "COCO's val2017 (5,000 images in images/, boxes in annotations.json; cocodataset.org)"
DOWNLOAD = "torchvision's weights (a download, or --weights FILE)"
DCGAN = "a DC-GAN's generator and discriminator (--model and --discriminator FILE.py:FACTORY); no data"
# What --quick stands on: factories of a checkout's benchmarks.
ZOO = "zoo.py:"
PHOTOGRAPHS, CIFAR, SCENES = "zoo_data.py:photographs", "zoo_data.py:cifar10", "zoo_data.py:street_scenes"
RESNET50 = "ResNet50 with Keras' ImageNet weights, on a sample of ImageNet photographs"
VGG16 = "VGG16 for 32×32 images, trained on CIFAR-10, in place of ImageNet's"
SSDLITE = "SSDLite with COCO weights, on COCO photographs"
FASTER = "Faster R-CNN with random weights, at a quarter of the size: outputs are compared, not AP"
VIT = "a small ViT of torchvision's, trained on CIFAR-10"
FACES = "a DC-GAN of 32×32 faces"
JUDGE = {"discriminator": f"{ZOO}dcgan_faces32_discriminator"}
FEATURES = {"features": f"{ZOO}resnet20_cifar10"}


def _quick(
    model: str, data: str | None, images: int, stands_for: str, layers: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Setup:  # fmt: skip
    return Setup(
        model, None, data, layers, spread=3, detectors=2, images=images, stands_for=stands_for, options=options or {}
    )


def _stains(
    name: str, title: str, needs: str, cost: str, full: Setup, *quick: Setup, data: str = "", kind: str = "images",
    where: str = "one at a time", measured: str = "accuracy",
) -> Figure:  # fmt: skip
    shows = (
        f"Stains that replace a neuron, in several layers, {where}: how natural inputs respond to the detectors, what"
        f" Theorems 1 and 2 and our bounds say of it, and {measured} before and after."
    )
    work = partial(StainWork, kind=kind)
    return Figure(
        f"stain-{name}", "stain", f"Staining {title}", shows, needs, cost, full, quick, work, draw_stains, data, kind,
        needs_layers="stain",
    )  # fmt: skip


def _classifier(name: str, model: str, title: str, detectors: int, minutes: str, *quick: Setup) -> Figure:
    full = Setup(f"torchvision:{model}", "pretrained", detectors=detectors)
    cost = (
        f"{detectors} stains in each of 6 layers, 50,000 images, evaluation shared: about 1 million forward passes;"
        f" --quick: {minutes}"
    )
    return _stains(name, title, f"{DOWNLOAD} and {IMAGENET}", cost, full, *quick, data=IMAGENET)


def _detector(name: str, model: str, title: str, minutes: str, *quick: Setup) -> Figure:
    full = Setup(f"torchvision:{model}", "pretrained", detectors=40)
    cost = f"40 stains in each of 6 layers, 5,000 images: 1.2 million forward passes; --quick: {minutes}"
    return _stains(
        name, title, f"{DOWNLOAD} and {COCO}", cost, full, *quick, data=COCO, measured="AP and AR"
    )  # fmt: skip


FIGURES = (
    _classifier("resnet50", "resnet50", "ResNet50", 50, "a minute",
        _quick(f"{ZOO}resnet50", PHOTOGRAPHS, 40, RESNET50, ("layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2"))),
    _classifier("vgg16", "vgg16", "VGG16", 50, "half a minute",
        _quick(f"{ZOO}vgg16_cifar10", CIFAR, 200, VGG16, ("features.7", "features.14", "features.21"))),
    _detector("ssdlite", "ssdlite320_mobilenet_v3_large", "SSDLite", "a minute",
        _quick(f"{ZOO}ssdlite_plainpad", SCENES, 16, SSDLITE, ("backbone.features.0.8.block.0.0",
               "backbone.features.0.12.block.0.0", "backbone.extra.0.0.0"))),
    _detector("fasterrcnn", "fasterrcnn_resnet50_fpn_v2", "Faster R-CNN", "a minute",
        _quick("detectors_models.py:small_fasterrcnn", SCENES, 8, FASTER, ("backbone.body.layer1.0.conv2",
               "backbone.body.layer2.0.conv2"), {"untrained": True})),
    _classifier("vit", "vit_b_16", "ViT-B/16", 50, "half a minute",
        _quick(f"{ZOO}vit_cifar10_torchvision", CIFAR, 200, VIT, tuple(f"encoder.layers.encoder_layer_{i}.mlp.0"
               for i in (0, 2, 4)))),
    _classifier("swin", "swin_b", "Swin-B", 40, "half a minute",
        _quick(f"{ZOO}swin_cifar10", CIFAR, 200, "a small Swin of torchvision's, trained on CIFAR-10"),
        _quick("swin_cifar10.py:untrained", CIFAR, 100, "a small Swin of torchvision's with random weights: outputs are"
               " compared, not accuracy", options={"untrained": True})),
    _stains("dcgan", "DC-GAN", DCGAN, "50 stains in each of 3 layers, 10,000 images each: 1.5 million images;"
            " --quick: half a minute", Setup(detectors=50, images=10_000, spread=3),
        _quick(f"{ZOO}dcgan_faces32_generator", None, 200, FACES, tuple(f"generator_deconv.{i}.0" for i in (1, 2, 3)),
               JUDGE | FEATURES),
        kind="noise", where="transposed convolutions too", measured="the discriminator's loss"),
    _stains("ddpm", "DDPM", "a diffusion model's U-Net (--model FILE.py:FACTORY), images of what it draws (--data DIR),"
            " and Inception's weights (--feature-weights) or another extractor (--features)", "40 stains in each of 4"
            " layers, 10,000 images each: 1.6 million images of 1000 forward passes; --quick: a minute",
            Setup(detectors=40, images=10_000, spread=4, options={"features": "inception", "steps": 1000}),
        _quick(f"{ZOO}ddpm_mnist", "zoo_data.py:digits", 200, "a small diffusion model of MNIST digits",
               ("downs.0.conv1", "downs.0.conv2", "downs.1.conv1"), FEATURES | {"steps": 200, "visited": 25,
               "drawn": 64}),
        data="images of what the model draws", kind="diffusion", where="in the U-Net's way down", measured="the Fréchet"
        " distance of what it draws"),
)  # fmt: skip
