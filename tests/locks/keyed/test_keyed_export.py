"""Keyed locks in other forms: exported, traced, compiled and in ONNX Runtime they read every image's bits as before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import stainlock as sl
from stainlock import Key, Target
from stainlock.target import evaluation_mode


@cache
def locked(name: str) -> tuple[Target, Target, Key]:
    target = models.encoder_net() if name == "encoder" else models.conv_net()
    return target, *sl.lock(target, seed=11, gates=2, scatter="all" if name == "scattered" else "first")


def batches(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Images with the patch, the original's outputs for them, and the same images with one patch spoilt."""
    target, _, key = locked(name)
    right = key.unlock(torch.rand(3, *target.input_shape, generator=torch.Generator().manual_seed(2)))
    mixed = right.clone()
    mixed[1] = -mixed[1]
    with evaluation_mode(target.model), torch.no_grad():
        return right, target(right), mixed


@cache
def program(name: str) -> torch.export.ExportedProgram:
    """Exported with one batch, run on others; made once, as the ONNX file is made from it."""
    sizes = ({0: torch.export.Dim("images", min=2, max=64)},)
    return torch.export.export(locked(name)[1].model, (batches(name)[2],), dynamic_shapes=sizes)


def exported(name: str) -> Callable[[Tensor], Tensor]:
    module: Any = program(name).module()
    return module  # type: ignore[no-any-return]


def traced(name: str) -> Callable[[Tensor], Tensor]:
    model: nn.Module = locked(name)[1].model
    return torch.jit.trace(model, (batches(name)[2],), check_trace=False)  # type: ignore[no-any-return, no-untyped-call]


def compiled(name: str) -> Callable[[Tensor], Tensor]:
    return torch.compile(locked(name)[1].model, backend="aot_eager", fullgraph=True)


def onnx(name: str) -> Callable[[Tensor], Tensor]:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    found = torch.onnx.export(program(name), dynamo=True, verbose=False, optimize=False)  # ONNX Runtime does it too
    assert found is not None
    session = onnxruntime.InferenceSession(found.model_proto.SerializeToString())
    own = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {own: x.numpy()})[0])


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("convolutional", form) for form in (exported, traced, compiled, onnx)),
        *(("encoder", form) for form in (exported, traced)),
        ("scattered", exported),
        pytest.param("scattered", compiled, marks=pytest.mark.slow),
        pytest.param("scattered", onnx, marks=pytest.mark.slow),
        pytest.param("encoder", compiled, marks=pytest.mark.slow),
        pytest.param("encoder", onnx, marks=pytest.mark.slow),  # made from the exported program
    ],
)
def test_other_forms_read_every_image(name: str, form: Callable[[str], Callable[[Tensor], Tensor]]) -> None:
    _, model, _ = locked(name)
    right, wanted, mixed = batches(name)
    with warnings.catch_warnings(), evaluation_mode(model.model), torch.no_grad():
        warnings.simplefilter("ignore")
        run = form(name)
        for given in (right, mixed):
            found = run(given)
            close = [bool(torch.allclose(a, b, atol=1e-4, rtol=1e-4)) for a, b in zip(found, wanted, strict=True)]
            assert close == [True, given is right, True]
            assert torch.allclose(found, model(given), atol=1e-4, rtol=1e-4)
