"""Check every model of the zoo: a table of measured and expected performance."""

from __future__ import annotations

import json

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchvision.ops import box_iou

import zoo
from stainlock.evaluation import evaluate
from stainlock.target import Target
from zoo_data import DIFFUSION_STEPS, SHARED, diffuse, digits

# Number of inputs, and the value published with the weights, on a sample of similar size.
EXPECTED = {
    "resnet50": (100, 0.89),
    "resnet20_cifar10": (500, 0.915),
    "resnet56_cifar10": (500, 0.926),
    "vgg16_cifar10": (500, 0.866),
    "vit_cifar10_torchvision": (500, 0.61),
    "vit_cifar10": (500, 0.705),
    "ddpm_mnist": (1000, 0.054),
    "efficientnet_lite0": (300, 0.88),
}


def measure(name: str, limit: int) -> tuple[str, float]:
    """Name and value of a metric that shows whether the model works."""
    target = getattr(zoo, name)()
    data = zoo.natural_data(name)
    if data.labels is not None:
        return "top-1", evaluate(target, data, limit=limit).value
    if name == "ddpm_mnist":
        return "ε-MSE", diffusion_error(target, limit)
    if target.part == "backbone":
        return "best box right", best_boxes_right(target, limit)
    pixels, _ = zoo.natural(name, limit)
    with torch.inference_mode():
        if name == "dcgan_faces32_generator":
            pixels = target.predict(pixels)
        return "mean logit of generated faces", float(zoo.dcgan_faces32_discriminator().predict(pixels).mean())


@torch.inference_mode()
def diffusion_error(target: Target, limit: int) -> float:
    """Mean squared error of the predicted noise, averaged uniformly over timesteps."""
    images = digits()[:limit]
    steps = torch.arange(len(images)) % DIFFUSION_STEPS
    noisy, noise = diffuse(images, steps)
    return float((target.model(noisy, steps) - noise).square().mean())


@torch.inference_mode()
def best_boxes_right(target: Target, limit: int) -> float:
    """The fraction of COCO images whose most confident box overlaps a true box of its class with IoU > 0.5."""
    coco = json.loads((SHARED / "data" / "coco64" / "annotations.json").read_text())
    right = 0
    images = coco["images"][:limit]
    for entry in images:
        path = SHARED / "data" / "coco64" / "images" / entry["file_name"]
        levels = torch.from_numpy(np.array(Image.open(path).convert("RGB")))
        found = target.model([levels.permute(2, 0, 1) / 255])[0]
        boxes = [a["bbox"] for a in coco["annotations"] if a["image_id"] == entry["id"]]
        classes = [a["category_id"] for a in coco["annotations"] if a["image_id"] == entry["id"]]
        if boxes and len(found["boxes"]):
            overlap = box_iou(found["boxes"][:1], _corners(boxes))[0]
            right += bool(((overlap > 0.5) & (torch.tensor(classes) == found["labels"][0])).any())
    return right / len(images)


def _corners(boxes: list[list[float]]) -> Tensor:
    corner_and_size = torch.tensor(boxes)
    return torch.cat([corner_and_size[:, :2], corner_and_size[:, :2] + corner_and_size[:, 2:]], dim=1)


def main() -> None:
    table = Table("model", "metric", "inputs", "measured", "expected")
    for name in zoo.NAMES:
        if reason := zoo.missing(name):
            table.add_row(name, reason)
            continue
        limit, expected = EXPECTED.get(name, (64, None))
        metric, value = measure(name, limit)
        inputs = min(limit, len(zoo.natural_data(name)))
        told = "" if expected is None else f"{expected:.3f}"
        table.add_row(name, metric, str(inputs), f"{value:.3f}", told)
    Console().print(table)
