"""Blocks inserted into a model: removed to the last bit, and rebuilt from their description in files."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import torch
from precision import EXACT, double

from stainlock import FileError, ModelError, Plan, Target, diff
from stainlock.insertion import Gated, Insertion
from stainlock.models.bundle import load_bundle, save_bundle
from stainlock.plan import Write

BLOCK = Insertion("squeeze-excite", "layer2.0.conv2", {"channels": 128, "hidden": 8})


def resnet() -> Target:
    return Target.from_reference("torchvision:resnet18", weights="random")


def with_block(target: Target, value: float = 3.0) -> Plan:
    """A gate that is nearly open everywhere, and a change of the layer behind it."""
    bias = Write("layer2.0.conv2.gate.fc2.bias", torch.arange(128), torch.full((128,), value), "disruptor")
    weight = Write("layer2.0.conv2.layer.weight", torch.arange(5), torch.ones(5), "conduit")
    return Plan((bias, weight), insertions=(BLOCK,))


def test_a_block_goes_in_and_out_to_the_last_bit() -> None:
    target = resnet()
    plan = with_block(target)
    locked = plan.apply(target)
    assert isinstance(locked.model.layer2[0].conv2, Gated)
    assert not isinstance(target.model.layer2[0].conv2, Gated)
    back = plan.inverse(target).apply(locked)
    assert back.insertions == ()
    assert models.same_state(back.model, target.model)
    images = torch.rand(2, 3, 64, 64)
    target.model.eval(), back.model.eval()
    assert torch.equal(back.model(images), target.model(images))


@pytest.mark.exact
def test_a_gate_scales_what_its_layer_is_given() -> None:
    target = double(resnet())
    gated = Plan(insertions=(BLOCK,)).apply(target).model.layer2[0].conv2
    features = torch.rand(2, 128, 8, 8, dtype=torch.float64)
    plain = target.model.layer2[0].conv2(features)
    assert torch.allclose(gated(features), plain / 2, rtol=EXACT)  # a zero block opens every gate half way


def test_a_delta_brings_its_blocks(tmp_path: Path) -> None:
    target = resnet()
    locked = with_block(target).apply(target)
    delta = diff(target, locked)
    delta.save(tmp_path / "delta")
    again = Plan.load(tmp_path / "delta").apply(target)
    assert again.insertions == locked.insertions
    assert models.same_state(again.model, locked.model)
    with pytest.raises(ModelError, match="blocks that the other lacks"):
        diff(locked, target)


def test_a_bundle_rebuilds_its_blocks(tmp_path: Path) -> None:
    target = resnet()
    locked = with_block(target).apply(target)
    save_bundle(locked, tmp_path / "locked")
    loaded = load_bundle(tmp_path / "locked")
    assert loaded.insertions == locked.insertions
    assert models.same_state(loaded.model, locked.model)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "wormhole"}, "expected a block of kind"),
        ({"at": "layer9"}, "has no layer9"),
        ({"facts": None}, "not fully described"),
        ({"facts": {"channels": 64}}, "not fully described"),
        ({"facts": {"channels": 64, "hidden": "many"}}, "expected sizes from 1 to"),
        ({"facts": {"channels": 60_000, "hidden": 60_000}}, "expected a block of at most"),
    ],
)
def test_bundles_with_unknown_blocks_are_told(tmp_path: Path, change: dict[str, object], says: str) -> None:
    target = resnet()
    save_bundle(with_block(target).apply(target), tmp_path / "locked")
    manifest = json.loads((tmp_path / "locked" / "stainlock.json").read_text())
    manifest["insertions"][0] |= change
    (tmp_path / "locked" / "stainlock.json").write_text(json.dumps(manifest | {"version": 2}))
    with pytest.raises((FileError, ModelError), match=says):
        load_bundle(tmp_path / "locked")


def test_only_the_last_block_can_be_taken_out() -> None:
    target = with_block(resnet()).apply(resnet())
    with pytest.raises(ModelError, match="no block"):
        Insertion("squeeze-excite", "layer1.0.conv2", {"channels": 64, "hidden": 8}).remove(target)
