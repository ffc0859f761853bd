"""Smaller number formats: 16 bits, and PyTorch's 8-bit quantisation, dynamic and static."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.deployment import folded
from stainlock.attacks.use.calibration import behind_the_gates, whole_model
from stainlock.gating.structure import Structure
from stainlock.locks.quantise import traceable
from stainlock.target import Target


def _fp16(subject: Subject, strength: Strength) -> Attacked:
    return _rounded(subject, torch.float16)


def _bf16(subject: Subject, strength: Strength) -> Attacked:
    return _rounded(subject, torch.bfloat16)


def _rounded(subject: Subject, dtype: torch.dtype) -> Attacked:
    """Every number of the model in 16 bits. It runs in 16 bits too, except in float16 on a CPU, which takes minutes."""
    changed = subject.target.copy()
    changed.model.to(dtype)
    if dtype is torch.bfloat16 or changed.device.type != "cpu":
        return Attacked(changed)
    changed.model.float()
    return Attacked(changed, note="weights rounded to 16 bits, run in 32")


def _dynamic(subject: Subject, strength: Strength) -> Attacked:
    from torch.ao.quantization import quantize_dynamic

    if not any(isinstance(module, nn.Linear) for module in subject.target.model.modules()):
        raise NotApplicable("PyTorch's dynamic quantisation covers only linear layers, and this model has none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but still in use
        model = quantize_dynamic(copy.deepcopy(subject.target.model).eval(), {nn.Linear}, dtype=torch.qint8)
    return Attacked(subject.target.with_model(model), note="linear layers only, as PyTorch's dynamic quantisation does")


def _static(subject: Subject, strength: Strength) -> Attacked:
    """Weights and activations in 8 bits."""
    return _calibrated(subject.target, *whole_model(subject))


def _behind(subject: Subject, strength: Strength) -> Attacked:
    return _calibrated(subject.target, *behind_the_gates(subject))


def _calibrated(target: Target, images: torch.Tensor, spared: Sequence[str]) -> Attacked:
    try:
        model = _quantised(target, images, spared)
    except Exception as error:  # tracing and converting run the code of the model and the backend
        why = " ".join(str(error).split())[:100] or type(error).__name__
        raise NotApplicable(f"PyTorch can't quantise this model statically ({why})") from error
    return Attacked(target.with_model(model), used=len(images))


def _quantised(target: Target, images: torch.Tensor, spared: Sequence[str]) -> nn.Module:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    ready, _ = folded(target)  # batch norms that include their activation would stay in 32 bits
    # Convolutions whose padding depends on the input size (as in TensorFlow) can't be traced and are not quantised.
    model: nn.Module = ready.model if Structure.of(ready) is None else traceable(ready)
    opaque = {type(m) for m in ready.model.modules() if isinstance(m, nn.Conv2d) and type(m) is not nn.Conv2d}
    config = PrepareCustomConfig().set_non_traceable_module_classes(list(opaque))
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        example = target.normalise(images[:1])
        mapping = get_default_qconfig_mapping("x86")
        for name in spared:
            mapping.set_module_name(name, None)
        prepare: Any = prepare_fx
        convert: Any = convert_fx
        prepared = prepare(model.eval(), mapping, (example,), prepare_custom_config=config)
        for batch in images.split(16):
            prepared(target.normalise(batch))
        converted: nn.Module = convert(prepared)
        converted(example)  # fails now if the backend lacks an operation
    return converted


BOTH = ("stain", "lock")
ATTACKS = (
    Attack("fp16", "use", BOTH, "nothing", (16,), _fp16, "weights in float16"),
    Attack("bf16", "use", BOTH, "nothing", (16,), _bf16, "weights and activations in bfloat16"),
    Attack("int8-dynamic", "use", BOTH, "nothing", (8,), _dynamic, "PyTorch's dynamic quantisation"),
    Attack("int8-static", "use", BOTH, "images", (8,), _static, "PyTorch's static quantisation"),
    Attack("int8-static-behind", "use", ("lock",), "images", (8,), _behind,
           "PyTorch's static quantisation after the last gate, calibrated with the patch"),
)  # fmt: skip
