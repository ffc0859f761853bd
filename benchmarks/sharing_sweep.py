"""A sweep over stains of a CIFAR ResNet, for `sharing.py`: units are layer × detector × shard of the images."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import zoo
from stainlock import Target, __version__, stain
from stainlock.evaluation import Tensors
from stainlock.numerics import model_digest
from stainlock.sweeps import Unit, run_sweep
from stainlock.target import evaluation_mode

MODEL = "resnet20_cifar10"


@dataclass(frozen=True)
class StainSweep:
    """How often each stain changes the prediction, and the mean of the largest logits."""

    layers: tuple[str, ...] = ("layer1.1.conv1", "layer2.1.conv1", "layer3.1.conv1")
    detectors: int = 4
    shards: int = 2
    images: int = 100

    def units(self) -> list[Unit]:
        return [
            Unit(f"{layer}/detector-{i}/shard-{shard}", {"layer": layer, "detector": i, "shard": shard})
            for layer in self.layers
            for i in range(self.detectors)
            for shard in range(self.shards)
        ]

    def identity(self) -> dict[str, Any]:
        target, pixels = _model_and_pixels(self.images)
        digests = {"model": model_digest(target.model), "data": Tensors(pixels).digest()}
        return {**digests, "shards": self.shards, "version": __version__}

    def prepare(self) -> tuple[Target, Tensor]:
        return _model_and_pixels(self.images)

    def run(self, state: tuple[Target, Tensor], unit: Unit) -> list[dict[str, Any]]:
        target, pixels = state
        mine = pixels.chunk(self.shards)[unit.facts["shard"]]
        stained, _ = stain(target, site=unit.facts["layer"], seed=unit.facts["detector"], steps=20)
        with evaluation_mode(target.model), evaluation_mode(stained.model), torch.inference_mode():
            before, after = target.predict(mine), stained.predict(mine)
        changed = int((before.argmax(1) != after.argmax(1)).sum())
        return [{**unit.facts, "images": len(mine), "changed": changed, "largest": float(after.amax(1).mean())}]


def _model_and_pixels(images: int) -> tuple[Target, Tensor]:
    return getattr(zoo, MODEL)(), zoo.natural(MODEL, images)[0]


if __name__ == "__main__":
    run_sweep(StainSweep(), sys.argv[1])
