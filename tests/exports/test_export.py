"""export(): other forms of a model compute the same, tell nothing of this machine, and are compared at once."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import stainlock as sl
from stainlock import Target
from stainlock.errors import ModelError

module = importlib.import_module("stainlock.exports.writing")


@pytest.mark.parametrize("name", ["out.safetensors", "out.onnx", "out.pt2"])
def test_a_form_computes_the_same(name: str, tmp_path: Path) -> None:
    if name.endswith("onnx"):
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    target = models.conv_net()
    before = models.snapshot(target.model)
    found = sl.export(target, tmp_path / name)
    models.assert_untouched(before, target.model)
    assert found.any_batch
    assert found.max_difference <= 1e-5
    assert str(Path(__file__).parents[2]).encode() not in (tmp_path / name).read_bytes()
    if name.endswith("safetensors"):
        assert found.max_difference == 0
        assert all(torch.equal(t, target.model.state_dict()[n]) for n, t in load_file(tmp_path / name).items())


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(path: Path) -> Any:
        return lambda inputs, *_: [torch.full((len(inputs), 10), 0.3)]

    monkeypatch.setattr(module, "run_program", other)
    with pytest.raises(ModelError, match="outputs differ from the model's by up to"):
        sl.export(models.conv_net(), tmp_path / "out.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_fixes_its_batch_takes_one_image_at_a_time(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 1:
                return torch.cat([self(row[None]) for row in x])  # a loop over the batch is unrolled
            out: Tensor = self.layer(x.flatten(1))
            return out

    found = sl.export(Target(Fixed(), (3, 2, 2)), tmp_path / "out.pt2")
    assert not found.any_batch


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("out.bin", None, "expected a name ending in .safetensors, .onnx, .pt2, or --format"),
        ("out.onnx", "tflite", "expected format safetensors, onnx, torch-export, got 'tflite'"),
    ],
)
def test_unknown_forms_are_refused(name: str, format: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        sl.export(models.mlp(), tmp_path / name, format=format)
