"""Changes that a thief or release engineer may make to a stained model; and models that must not be called stained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import nn
from torch.nn.utils import fuse_conv_bn_eval, prune

from stainlock import Key, Target, verify

CASES: dict[str, tuple[str, str, str | None, str]] = {  # model, site, its norm, its reader
    "resnet56": ("resnet56_cifar10", "layer3.2.conv1", "layer3.2.bn1", "layer3.2.conv2"),
    "resnet20": ("resnet20_cifar10", "layer3.2.conv1", "layer3.2.bn1", "layer3.2.conv2"),
    "vit": ("vit_cifar10", "transformer.layers.3.linear1", None, "transformer.layers.3.linear2"),
    "vgg": ("vgg16_cifar10", "features.10", None, "features.12"),
    "efficientnet": ("efficientnet_lite0", "blocks.6.0.conv_pw", "blocks.6.0.bn1", "blocks.6.0.conv_pwl"),
}


def parts(model: nn.Module, case: str) -> tuple[Any, Any, Any]:
    _, site, norm, reader = CASES[case]
    return model.get_submodule(site), model.get_submodule(norm) if norm else None, model.get_submodule(reader)


def rows_of(layer: Any, norm: Any) -> list[torch.Tensor]:
    tensors = [
        layer.weight,
        layer.bias,
        *((norm.weight, norm.bias, norm.running_mean, norm.running_var) if norm else ()),
    ]
    return [t for t in tensors if t is not None]


def permuted(model: nn.Module, case: str) -> nn.Module:
    """The site's channels in another order, and the reader's inputs to match."""
    layer, norm, reader = parts(model, case)
    order = torch.randperm(len(layer.weight))
    for tensor in rows_of(layer, norm):
        tensor.copy_(tensor[order])
    reader.weight.copy_(reader.weight[:, order])
    return model


def rescaled(model: nn.Module, case: str) -> nn.Module:
    """Every channel is multiplied by its own factor, and the reader divides by it."""
    layer, norm, reader = parts(model, case)
    factors = torch.exp(torch.randn(len(layer.weight)))
    targets = [layer.weight, layer.bias] if norm is None else [norm.weight, norm.bias]
    for tensor in targets:
        tensor.mul_(factors.view(-1, *(1,) * (tensor.dim() - 1)))
    reader.weight.div_(factors.view(1, -1, *(1,) * (reader.weight.dim() - 2)))
    return model


def folded(model: nn.Module, case: str) -> nn.Module:
    """Batch norm into the convolution, as exporters do."""
    _, site, norm, _ = CASES[case]
    assert norm is not None
    batch_norm = model.get_submodule(norm)
    fused = fuse_conv_bn_eval(model.get_submodule(site), batch_norm)
    after = getattr(batch_norm, "act", nn.Identity())  # timm's batch norms carry their activation
    for name, module in ((site, fused), (norm, after)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    return model


def pruned(model: nn.Module, case: str) -> nn.Module:
    weights = [(m, "weight") for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    prune.global_unstructured(weights, prune.L1Unstructured, amount=0.3)
    for module, name in weights:
        prune.remove(module, name)
    return model


def pruned_layer(model: nn.Module, case: str) -> nn.Module:
    layer, _, _ = parts(model, case)
    prune.remove(prune.l1_unstructured(layer, "weight", 0.3), "weight")
    return model


def noisy(model: nn.Module, case: str) -> nn.Module:
    for parameter in model.parameters():
        parameter.add_(0.01 * parameter.std(unbiased=False) * torch.randn_like(parameter))
    return model


def quantised(model: nn.Module, case: str) -> nn.Module:
    """Weights rounded to 8 bits, one scale per tensor."""
    for parameter in model.parameters():
        step = parameter.abs().max() / 127
        parameter.copy_((parameter / step).round() * step)
    return model


CHANGES: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "nothing": lambda model, _: model,
    "permuted": permuted,
    "rescaled": rescaled,
    "permuted and rescaled": lambda model, case: permuted(rescaled(model, case), case),
    "fp16": lambda model, _: model.half(),
    "bf16": lambda model, _: model.bfloat16(),
    "fp16 and back": lambda model, _: model.half().float(),
    "batch norm folded": folded,
    "pruned": pruned,
    "layer pruned": pruned_layer,
    "noise": noisy,
    "8 bits": quantised,
    "channels last": lambda model, _: model.to(memory_format=torch.channels_last),
    "training mode": lambda model, _: model.train(),
}
EXACT = ("nothing", "permuted", "rescaled", "permuted and rescaled", "batch norm folded", "channels last")


def changed(marked: Target, case: str, change: str) -> nn.Module:
    with torch.no_grad():
        return CHANGES[change](copy.deepcopy(marked.model), case)


def stain_of(case: str, additive: bool, seed: int = 1) -> tuple[Target, Key]:
    name, site, _, _ = CASES[case]
    return models.stained(name, site, additive=additive, seed=seed, steps=40 if case != "efficientnet" else 12)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    "case", ["resnet20", "vit", *(pytest.param(case, marks=pytest.mark.slow) for case in ("resnet56", "efficientnet"))]
)
@models.analysed_once()
def test_a_stain_survives(case: str, additive: bool, change: str) -> None:
    if change == "batch norm folded" and CASES[case][2] is None:
        change = "permuted and rescaled"  # no batch norm here
    if case == "efficientnet" and "rescaled" in change:
        change = "permuted"  # a depthwise layer lies between
    marked, key = stain_of(case, additive)
    model = changed(marked, case, change)
    if change in EXACT and not (case == "efficientnet" and change == "permuted"):
        images = models.pixels(CASES[case][0], 4)  # the change is one that a thief can make for free
        with torch.no_grad():
            after = model.eval()(marked.normalise(images))
            torch.testing.assert_close(after, marked.predict(images), rtol=1e-3, atol=1e-3)
    verdict = verify(model, key, method="weights")
    assert verdict.stained
    assert verdict.p_value < 1e-12
    assert verify({f"net.0.{name}": tensor for name, tensor in model.state_dict().items()}, key).stained


HEARD = ["permuted and rescaled"]
HEARD_TOO = [
    pytest.param(change, marks=pytest.mark.slow) for change in ("nothing", "layer pruned", "noise", "fp16 and back")
]


@pytest.mark.parametrize("change", [*HEARD, *HEARD_TOO])
@pytest.mark.parametrize("additive", [False, True])
@models.analysed_once()
def test_a_stain_is_heard_after(additive: bool, change: str) -> None:
    """Found by response: the layer computes the same, in whatever order its channels are."""
    marked, key = stain_of("vgg", additive)
    assert verify(changed(marked, "vgg", change), key, method="response").stained


@pytest.mark.slow
@pytest.mark.parametrize("change", ["nothing", "permuted", "batch norm folded"])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("case", ["resnet56", "vit"])
def test_a_stain_is_heard_in_deep_layers(case: str, additive: bool, change: str) -> None:
    if change == "batch norm folded" and CASES[case][2] is None:
        change = "permuted and rescaled"
    marked, key = stain_of(case, additive)
    assert verify(changed(marked, case, change), key, method="response").stained


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("case", ["resnet20", "vit", pytest.param("resnet56", marks=pytest.mark.slow)])
@models.analysed_once()
def test_others_are_not_taken_for_it(case: str, additive: bool) -> None:
    name = CASES[case][0]
    _, key = stain_of(case, additive)
    other, _ = stain_of(case, additive, seed=2)
    random = copy.deepcopy(models.real(name).model)
    for module in random.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for suspect in (models.real(name), other, random):
        verdict = verify(suspect, key, method="weights")
        assert not verdict.stained
        assert verdict.p_value > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("case", ["resnet56", "vit"])
def test_others_are_not_taken_for_it_by_any_method(case: str, additive: bool) -> None:
    name = CASES[case][0]
    _, key = stain_of(case, additive)
    other, _ = stain_of(case, additive, seed=2)
    for suspect in (models.real(name), other):
        verdict = verify(suspect, key)
        assert not verdict.stained
        assert verdict.p_value > 1e-3


@pytest.mark.parametrize("change", ["permuted", "batch norm folded", "noise", "bf16"])
@models.analysed_once()
def test_output_triggers_survive(change: str) -> None:
    marked, key = models.stained("resnet20_cifar10", schema="output", count=8)
    model = changed(marked, "resnet20", change).eval()
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        assert verify(lambda inputs: model(inputs.to(dtype)).float(), key, normalised=True).statistic >= 0.75
