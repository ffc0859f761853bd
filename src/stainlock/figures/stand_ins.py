"""The models and data that figures run on: descriptions of the paper's, and small ones that ``--quick`` uses instead.

The small models and their data are built by the factories in a checkout's ``benchmarks`` folder.
"""

from __future__ import annotations

from stainlock.figures.figure import Setup

IMAGENET = "ImageNet's validation set (50,000 images in class folders; image-net.org, after registering)"
COCO = "COCO's val2017 (5,000 images in images/, boxes in annotations.json; cocodataset.org)"
DOWNLOAD = "torchvision's weights (a download, or --weights FILE)"
GENERATOR = "a DC-GAN's generator and discriminator (--model and --discriminator FILE.py:FACTORY); no data"

_ZOO = "zoo.py:"
_PHOTOGRAPHS, _CIFAR, _SCENES = "zoo_data.py:photographs", "zoo_data.py:cifar10", "zoo_data.py:street_scenes"
FEATURES = {"features": f"{_ZOO}resnet20_cifar10"}  # for Fréchet distances

RESNET50 = Setup(
    f"{_ZOO}resnet50", data=_PHOTOGRAPHS, name="ResNet50 (Keras weights)", classes="imagenet",
    stands_for="ResNet50 with Keras's ImageNet weights, on a sample of ImageNet photographs",
)  # fmt: skip
RESNET20 = Setup(
    f"{_ZOO}resnet20_cifar10", data=_CIFAR, name="ResNet20 for CIFAR-10", classes="cifar10",
    stands_for="ResNet20 trained on CIFAR-10, on CIFAR-10 test images",
)  # fmt: skip
VGG16 = Setup(
    f"{_ZOO}vgg16_cifar10", data=_CIFAR, name="VGG16 for CIFAR-10", classes="cifar10",
    stands_for="VGG16 for 32×32 images, trained on CIFAR-10, on CIFAR-10 test images",
)  # fmt: skip
VIT = Setup(
    f"{_ZOO}vit_cifar10_torchvision", data=_CIFAR, name="small ViT for CIFAR-10", classes="cifar10",
    stands_for="torchvision's ViT with 6 blocks of width 128, trained on CIFAR-10, on CIFAR-10 test images",
)  # fmt: skip
SWIN = Setup(
    f"{_ZOO}swin_cifar10", data=_CIFAR, name="small Swin for CIFAR-10", classes="cifar10",
    stands_for="torchvision's Swin with 6 blocks, trained on CIFAR-10, on CIFAR-10 test images",
)  # fmt: skip
UNTRAINED_SWIN = Setup(
    "swin_cifar10.py:untrained", data=_CIFAR, name="small Swin with random weights", options={"untrained": True},
    stands_for="torchvision's Swin with 6 blocks and random weights, on CIFAR-10 test images; without training there"
    " is no accuracy to measure, so outputs are compared instead",
)  # fmt: skip
SSDLITE = Setup(
    f"{_ZOO}ssdlite_plainpad", data=_SCENES, name="SSDLite",
    stands_for="SSDLite with COCO weights, on a sample of COCO photographs",
)  # fmt: skip
FASTER = Setup(
    "object_detectors_models.py:small_fasterrcnn", data=_SCENES, name="Faster R-CNN with random weights",
    options={"untrained": True},
    stands_for="Faster R-CNN with random weights on COCO photographs at a quarter of the usual size; without training"
    " there is no AP to measure, so outputs are compared instead",
)  # fmt: skip
DCGAN = Setup(
    f"{_ZOO}dcgan_faces32_generator", name="DC-GAN for 32×32 faces", stands_for="a DC-GAN for 32×32 faces",
    options={"discriminator": f"{_ZOO}dcgan_faces32_discriminator"},
)  # fmt: skip
DDPM = Setup(
    f"{_ZOO}ddpm_mnist", data="zoo_data.py:digits", name="small diffusion model for MNIST",
    stands_for="a small diffusion model for MNIST digits",
    options=FEATURES | {"steps": 200, "visited": 25, "drawn": 64},
)  # fmt: skip
