"""What docs/threat_model.md concedes of the internal lock is true."""

from __future__ import annotations

import pytest
import torch

import stainlock as sl
import zoo
from stainlock.storage.weights import check_finite


def top1(target: sl.Target, pixels: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.inference_mode():
        return float((target.predict(pixels).argmax(1) == labels).double().mean())


@pytest.mark.parametrize("name", ["efficientnet_lite0", "resnet56_cifar10"])
def test_zeroing_the_last_biases_opens_the_lock(name: str) -> None:
    if reason := zoo.missing(name):
        pytest.skip(reason)
    target: sl.Target = getattr(zoo, name)()
    pixels, labels = zoo.natural(name, 40)
    assert labels is not None
    locked, key = sl.lock(target, kind="internal", seed=0, steps=20, restarts=2, obfuscate=False)
    before, ruined = top1(target, pixels, labels), top1(locked, pixels, labels)
    assert ruined <= 0.25 < before
    stolen = locked.copy()
    layer = stolen.model.get_submodule(key.details["layers"][-1])
    layer.bias.data.zero_()
    check_finite(stolen.model)
    assert top1(stolen, pixels, labels) >= before - 0.1
