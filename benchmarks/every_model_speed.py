"""CPU time of stain, lock and verify, in units of one forward pass of one image through the same model.

    python benchmarks/every_model_speed.py [MODEL...]

The stain is the median of five, with different seeds; in brackets the first one, which includes what PyTorch prepares
when it sees a layer and a size of image for the first time. The next column has its seconds. Positive: verifying the
stained copy with method `auto`, where weights suffice. Negative: verifying the original with `auto`, by weights and
responses. Five keys: the original with five keys at once. One thread; the unit is the median of nine forward passes.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from every_model_list import built
from stainlock import Key, Target, lock, stain, verify
from stainlock.target import evaluation_mode, synthetic_inputs

MODELS = (
    "torchvision:resnet18", "torchvision:mobilenet_v3_small", "torchvision:efficientnet_b0", "torchvision:densenet121",
    "torchvision:shufflenet_v2_x1_0", "torchvision:convnext_tiny", "torchvision:swin_t", "timm:vit_tiny_patch16_224",
    "timm:halonet26t", "timm:mobilevit_xxs", "timm:levit_128s", "timm:fastvit_t8", "timm:regnety_004",
    "timm:xcit_nano_12_p8_224", "ultralytics:yolo11n.yaml?image_size=320", "smp:Unet?encoder_name=resnet18",
    "transformers:ViTForImageClassification, B/16", "transformers:SegformerForSemanticSegmentation, B0",
    "diffusers:UNet2DModel, as for CIFAR-10", "torchvision:ssdlite320_mobilenet_v3_large",
)  # fmt: skip
_KEYS = 5


def row(name: str) -> str:
    target = built(name)
    gc.collect()
    gc.freeze()  # searching this process's many imports for garbage takes longer than most stains
    one = _forward(target)
    made: list[tuple[Target, Key]] = []
    stains = [_cost(lambda seed=seed: made.append(stain(target, seed=seed))) for seed in range(_KEYS)]  # type: ignore[misc]
    usual = statistics.median(stains)
    marked, key = made[0]
    costs = [
        _cost(lambda: lock(target, seed=0)),
        _cost(lambda: verify(marked, key)),
        _cost(lambda: verify(target, key)),
        _cost(lambda: verify(target, [key for _, key in made])),
    ]
    cells = " | ".join(f"{cost / one:.1f}" for cost in costs)
    shown = f"{usual / one:.1f} ({stains[0] / one:.1f}) | {usual:.2f}"
    return f"| {name.partition('?')[0]} | {one:.3f} | {shown} | {cells} |"


def _forward(target: Target) -> float:
    image = synthetic_inputs(target, 1, torch.Generator().manual_seed(0))
    with evaluation_mode(target.model), torch.no_grad():
        target.predict(image)
        return statistics.median(_cost(lambda: target.predict(image)) for _ in range(9))


def _cost(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    print("| model | forward pass, s | stain (the first) | s | keyed lock | verify, positive | negative | five keys |")
    print("|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or MODELS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
