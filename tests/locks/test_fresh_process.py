"""Locked models and keys in files, opened by a process that did not lock them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fresh
import models
import torch
from locked import distance, run
from precision import rounding
from torch import Tensor
from vit_models import SIZES

from stainlock import Key, Plan, Target, load_bundle, lock, save_bundle
from stainlock.plan import diff
from stainlock.target import synthetic_inputs

FACTORY = """
import torch
from torchvision.models import VisionTransformer
from stainlock import Target

def build():
    torch.manual_seed(0)
    model = VisionTransformer(image_size=32, patch_size=8, **{sizes})
    torch.nn.init.normal_(model.heads.head.weight)
    return Target(model.eval(), (3, 32, 32))
"""

ELSEWHERE = """
import sys, torch
from pathlib import Path
from stainlock import Key, load_bundle

for folder in map(Path, sys.argv[1:]):
    target, key = load_bundle(folder / "bundle", trust_code=folder.name == "deeper"), Key.load(folder / "key")
    target.model.eval()
    with torch.inference_mode():
        torch.save(target(key.unlock(torch.load(folder / "images"))), folder / "found")
    key.original(target), key.edited(target)
    print(folder.name)
"""


def with_new_blocks() -> tuple[Target, Target, Key]:
    full = Target.from_reference("torchvision:resnet18?num_classes=10", weights="random")
    base = replace(full, input_shape=(3, 64, 64))
    return base, *lock(base, kind="squeeze-excite", gates=1, site="layer1.0.conv1", seed=0, steps=10, restarts=2)


def one_block_deeper(factory: Path) -> tuple[Target, Target, Key]:
    factory.parent.mkdir()
    factory.write_text(FACTORY.replace("{sizes}", repr(SIZES)), encoding="utf-8")
    base = Target.from_reference(f"{factory}:build")
    return base, *lock(base, kind="vit", seed=0, steps=3)


def test_bundles_of_changed_architectures_open_in_a_fresh_process(tmp_path: Path) -> None:
    """Both in one process, because starting it takes longer than all the rest."""
    locks = {"blocks": with_new_blocks(), "deeper": one_block_deeper(tmp_path / "deeper" / "factory.py")}
    images: dict[str, Tensor] = {}
    for name, (base, target, key) in locks.items():
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        save_bundle(target, folder / "bundle")
        key.save(folder / "key")
        images[name] = synthetic_inputs(base, 3, torch.Generator().manual_seed(0))
        torch.save(images[name], folder / "images")
    done = fresh.run(ELSEWHERE, *(str(tmp_path / name) for name in locks))
    assert done.stdout.split() == list(locks), done.stderr
    for name, (base, target, key) in locks.items():
        folder, expected = tmp_path / name, run(target, key.unlock(images[name]))
        assert distance(torch.load(folder / "found"), expected) <= rounding(target.model)
        again = load_bundle(folder / "bundle", model=base)
        assert models.same_state(again.model, target.model)
        assert torch.allclose(run(again, Key.load(folder / "key").unlock(images[name])), expected, atol=1e-6)
        diff(base, target).save(folder / "delta")
        assert models.same_state(Plan.load(folder / "delta").apply(base).model, target.model)
