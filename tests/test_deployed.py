"""Weights of deployed models: 8-bit PyTorch layers and programs of torch.export, read without running anything."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stainlock as sl
from stainlock.errors import FileError
from stainlock.storage.deployed import read_deployed
from stainlock.storage.weights import read_weights

CONTENTS = "data/weights/model_weights_config.json"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(128, 10)).eval()


def _dynamic(model: nn.Module) -> dict[str, Any]:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8).state_dict()


def _static(model: nn.Module) -> dict[str, Any]:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    image = torch.rand(2, 3, 12, 12)
    prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), (image,))
    prepared(image)
    state: dict[str, Any] = convert_fx(prepared).state_dict()
    return state


@pytest.mark.parametrize("quantise", [_dynamic, _static])
@pytest.mark.parametrize("wrapped", [False, True])
def test_eight_bit_layers_are_read_in_floats(
    model: nn.Module, tmp_path: Path, quantise: Callable[[nn.Module], dict[str, Any]], wrapped: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated: PyTorch's quantisation will move to another package
        state = quantise(model)
    path = tmp_path / "small.pt"
    torch.save({"model": state, "epoch": 3} if wrapped else state, path)
    with pytest.raises(FileError):
        read_weights(path)  # no model has these names
    found = read_deployed(path)
    ours = model.state_dict()["5.weight"]
    assert found["5.weight"].dtype == torch.float32
    assert float((found["5.weight"] - ours).abs().max()) <= float(ours.abs().max()) / 127
    assert torch.equal(found["5.bias"], model.state_dict()["5.bias"])
    assert found["0.weight"].shape == (8, 3, 3, 3)


def test_a_program_holds_the_very_weights(model: nn.Module, tmp_path: Path) -> None:
    target = sl.Target(model, input_shape=(3, 12, 12))
    sl.export(target, tmp_path / "m.pt2")
    found = read_deployed(tmp_path / "m.pt2")
    floats = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    for ours in floats:
        assert any(theirs.shape == ours.shape and torch.equal(theirs, ours) for theirs in found.values())


def test_other_files_are_read_as_ever(model: nn.Module, tmp_path: Path) -> None:
    torch.save(model.state_dict(), tmp_path / "m.pth")
    assert read_deployed(tmp_path / "m.pth").keys() == read_weights(tmp_path / "m.pth").keys()
    for name in ("gone.pt2", "gone.pt", "m.txt"):
        with pytest.raises(FileError):
            read_deployed(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [{"use_pickle": True}, {"path_name": "../../x"}, {"path_name": 3}, {"sizes": [{"as_int": 2**40}]},
     {"strides": [{"as_int": 10**6}] * 4}, {"strides": [{"as_int": 0}] * 2}, {"storage_offset": {"as_int": -1}},
     {"sizes": [{"as_expr": "s0"}]}, {"storage_offset": {"as_int": 2**47}}, {"dtype": []}],
)  # fmt: skip
def test_a_program_whose_table_is_wrong(model: nn.Module, tmp_path: Path, change: dict[str, Any]) -> None:
    """Sizes beyond the data, endlessly repeated values, pickles, other members of the file."""
    torch.export.save(torch.export.export(model, (torch.rand(1, 3, 12, 12),)), tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2") as source, zipfile.ZipFile(tmp_path / "wrong.pt2", "w") as made:
        for member in source.infolist():
            data = source.read(member)
            if member.filename.endswith(CONTENTS):
                facts = json.loads(data)
                one = facts["config"]["0.weight"]
                (one if set(change) & set(one) else one["tensor_meta"]).update(change)
                data = json.dumps(facts).encode()
            made.writestr(member.filename, data)
    with pytest.raises(FileError) as caught:
        read_deployed(tmp_path / "wrong.pt2")
    assert "\n" not in str(caught.value)


def test_what_is_no_program(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "m.pt2").write_bytes(b"text")
    with pytest.raises(FileError, match="not a complete"):
        read_deployed(tmp_path / "m.pt2")
    torch.save(model.state_dict(), tmp_path / "w.pt2")
    with pytest.raises(FileError, match=r"not a torch.export program"):
        read_deployed(tmp_path / "w.pt2")
