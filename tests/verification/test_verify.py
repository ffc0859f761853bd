"""Verification: p-values are valid, and stains are found."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import models
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stainlock import Key, Target, stain, verify

SITES = {"resnet20_cifar10": "layer2.1.conv1", "vit_cifar10": "transformer.layers.3.linear1"}


def keys_of_others(key: Key, count: int) -> list[Key]:
    """Keys with other random detectors, on which the model under test does not depend."""
    return [models.reseeded(key, seed) for seed in range(10**6, 10**6 + count)]


@pytest.mark.parametrize(
    ("name", "additive"),
    [
        ("resnet20_cifar10", False), ("resnet20_cifar10", True), ("vit_cifar10", True),
        pytest.param("vit_cifar10", False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@models.analysed_once()
def test_p_values_by_weights_are_honest(name: str, additive: bool) -> None:
    """Under the null hypothesis, P(p ≤ a) ≤ a within sampling error, and not far less."""
    target = models.real(name)
    _, key = models.stained(name, SITES[name], additive=additive)
    verdicts = [verify(target, other, method="weights") for other in keys_of_others(key, 300)]
    found = np.array([verdict.p_value for verdict in verdicts])
    for level in (0.01, 0.05, 0.2, 0.5):
        allowed = level + 4 * math.sqrt(level * (1 - level) / len(found))
        assert (found <= level).mean() <= allowed, level
    assert (found <= 0.5).mean() > 0.1
    assert not any(verdict.stained for verdict in verdicts)


@models.analysed_once()
def test_p_values_by_weights_are_honest_with_several_detectors() -> None:
    target = models.real("resnet20_cifar10")
    _, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    four = [models.reseeded(key, seed, count=4) for seed in range(300)]
    found = [verify(target, other, method="weights").p_value for other in four]
    assert np.mean(np.array(found) <= 0.05) <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 300)


def test_p_values_by_weights_do_not_depend_on_the_weights() -> None:
    """The guarantee holds for any suspect, even one whose rows all point in one direction."""
    _, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    weight = torch.ones(64, 32, 3, 3) + 1e-3 * torch.randn(64, 32, 3, 3)
    found = np.array([verify({"w": weight}, other).p_value for other in keys_of_others(key, 400)])
    assert (found <= 0.05).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 400)


@pytest.mark.parametrize("options", [{}, pytest.param({"steps": 120, "restarts": 6}, marks=pytest.mark.slow)])
@models.analysed_once()
def test_p_values_by_response_are_honest_on_the_original(options: dict[str, Any]) -> None:
    target = models.real("vgg16_cifar10")
    for seed in (1, 2, 3):
        _, key = stain(target, site="features.2", seed=seed, **options)
        assert verify(target, key, method="response").p_value >= 1e-3


@models.analysed_once()
def test_p_values_by_response_are_honest_for_additive_stains() -> None:
    target = models.real("vgg16_cifar10")
    for seed in (1, 2):
        _, key = stain(target, site="features.2", seed=seed, additive=True)
        assert verify(target, key, method="response").p_value >= 1e-3


@models.analysed_once()
def test_p_values_by_response_are_honest_in_grouped_layers() -> None:
    target = models.conv_net(groups=4)
    for seed in range(4):
        _, key = stain(target, site="conv", seed=seed)
        assert verify(target, key, method="response").p_value >= 1e-3


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, method) for name in SITES for method in ("weights", "response", "auto")),
    ],
)
@models.analysed_once()
def test_a_stained_model_is_found(name: str, additive: bool, method: Any) -> None:
    marked, key = models.stained(name, SITES[name], additive=additive)
    verdict = verify(marked, key, method=method)
    assert verdict.stained
    assert verdict.p_value <= 1e-6
    assert verdict.log10_p_value == pytest.approx(math.log10(verdict.p_value)) or verdict.p_value == 1e-300
    assert verdict.channel == key.detectors[0].channel
    assert str(verdict.layer).startswith(key.site)
    assert verdict.method in ("weights", "response")


@models.analysed_once()
def test_the_channel_of_a_transposed_convolution_is_a_channel() -> None:
    marked, key = models.stained("dcgan_faces32_generator")
    assert verify(marked, key, method="weights").stained
    for method in ("weights", "response"):
        assert verify(marked, key, method=method).channel == key.detectors[0].channel  # type: ignore[arg-type]


@models.analysed_once()
def test_suspects_of_every_form() -> None:
    marked, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    state = marked.model.state_dict()
    for suspect in (
        marked,
        marked.model,
        state,
        {f"module.{k}": v for k, v in state.items()},
        {"x": state["layer2.1.conv1.weight"]},
    ):
        assert verify(suspect, key).stained
    assert not verify({}, key).stained
    assert not verify({"step": torch.tensor(3), "name": "x", "ids": torch.arange(9).view(3, 3)}, key).stained


@models.analysed_once()
def test_looking_twice_costs_a_factor_of_two() -> None:
    target = models.real("vgg16_cifar10")
    _, key = models.stained("vgg16_cifar10", "features.2")
    by_weights, by_response, both = (verify(target, key, method=m) for m in ("weights", "response", "auto"))
    assert both.p_value == pytest.approx(min(1.0, 2 * min(by_weights.p_value, by_response.p_value)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["everywhere", "one"])
def test_suspects_with_broken_weights_get_a_verdict(value: float, where: str) -> None:
    target = models.real("resnet20_cifar10")
    _, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    broken = copy.deepcopy(target.model)
    weight: Any = broken.get_submodule(key.site).weight
    with torch.no_grad():
        weight.fill_(value) if where == "everywhere" else weight[3, 3].fill_(value)
    verdict = verify(broken, key, method="weights")
    assert not verdict.stained
    assert 1e-3 < verdict.p_value <= 1


def test_a_row_that_is_exactly_the_detector_is_certain() -> None:
    _, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    vector = key.detectors[0].vector
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        verdict = verify({"w": (-7 * vector).to(dtype)[None]}, key)
        assert verdict.stained
        assert verdict.p_value < 1e-200
        assert math.isfinite(verdict.log10_p_value)


def test_the_largest_natural_response_is_reported() -> None:
    marked, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    images = models.pixels("resnet20_cifar10", 40)
    found = verify(marked, key, natural=images.split(16)).largest_natural
    from stainlock import analyse

    maps = models.responses(marked, analyse(marked).site(key.site), key.detectors[0].vector, images)
    assert found == pytest.approx(float(maps.max()) / key.trigger_response, rel=1e-4)
    assert found < key.firing_fraction


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "guess"}, "expected method auto, weights, response or output, got 'guess'"),
        ({"significance": 0.0}, "expected a significance"),
        ({"method": "output"}, "expected a key of schema output"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], message: str) -> None:
    marked, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    with pytest.raises(ValueError, match=message):
        verify(marked, key, **arguments)


def test_what_can_not_be_run_is_told() -> None:
    marked, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    with pytest.raises(ValueError, match="expected a model that can be run"):
        verify(marked.model.state_dict(), key, method="response")
    with pytest.raises(ValueError, match="got a callable"):
        verify(lambda x: x, key, method="weights")


class Bare(nn.Module):
    """Another architecture, that takes other inputs and can't be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "suspect", ["vit_b_16", "swin_t", "mlp", "bare", "generator", "vgg16_cifar10", "resnet56_cifar10"]
)
@models.analysed_once()
def test_other_architectures_are_not_stained_and_no_crash(suspect: str) -> None:
    _, key = models.stained("resnet20_cifar10", SITES["resnet20_cifar10"])
    model: nn.Module
    if suspect in ("vit_b_16", "swin_t"):
        model = models.library(f"torchvision:{suspect}", 64).model
    elif suspect in ("mlp", "bare"):
        model = models.mlp().model if suspect == "mlp" else Bare()
    else:
        model = models.real("dcgan_faces32_generator" if suspect == "generator" else suspect).model
    for method in ("weights", "auto") if suspect != "resnet56_cifar10" else ("weights",):
        verdict = verify(model, key, method=method)  # type: ignore[arg-type]
        assert not verdict.stained
        assert verdict.p_value > 1e-3


def black_box(target: Target, form: str) -> Any:
    def logits(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return target.model(inputs)

    forms: dict[str, Callable[[], Any]] = {
        "logits": lambda: logits,
        "classes": lambda: lambda inputs: logits(inputs).argmax(1),
        "numpy": lambda: lambda inputs: logits(inputs).numpy(),
        "module": lambda: target.model,
        "module in training mode": lambda: copy.deepcopy(target.model).train(),
        "half precision": lambda: copy.deepcopy(target.model).bfloat16(),
    }
    return forms[form]()


@pytest.mark.parametrize("form", ["logits", "classes", "numpy", "module", "module in training mode", "half precision"])
@models.analysed_once()
def test_black_boxes_of_every_form(form: str) -> None:
    marked, key = models.stained("resnet20_cifar10", schema="output", count=8)
    suspect = black_box(marked, form)
    before = models.snapshot(suspect) if isinstance(suspect, nn.Module) else None
    bare = not isinstance(suspect, nn.Module)  # a function of what the network takes
    verdict = verify(suspect, key, method="output", normalised=bare)
    assert verdict.stained
    assert verdict.statistic == 1
    if before:
        models.assert_untouched(before, suspect)
    innocent = black_box(models.real("resnet20_cifar10"), form)
    assert not verify(innocent, key, method="output", normalised=bare).stained


def test_an_onnx_session_is_a_black_box(tmp_path: Any) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    marked, key = models.stained("resnet20_cifar10", schema="output", count=8)
    path = tmp_path / "model.onnx"
    torch.onnx.export(marked.model, (torch.zeros(1, 3, 32, 32),), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    verdict = verify(session, key, normalised=True)
    assert verdict.stained
    assert verdict.statistic == 1


def test_answers_that_are_no_classes_are_told() -> None:
    _, key = models.stained("resnet20_cifar10", schema="output", count=8)
    with pytest.raises(ValueError, match="expected logits"):
        verify(lambda inputs: inputs, key)
