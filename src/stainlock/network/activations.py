"""Activations: below which input each is silent, the value it then has, and where it saturates."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Activation:
    """What a detector needs to know about the activation after it.

    For pre-activations below ``silent_below`` the output is ``rest`` plus ``leak`` times the pre-activation, to within
    ``residue``. For those above ``ceiling`` it no longer grows.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    silent_below: float
    rest: float = 0.0
    residue: float = 0.0
    leak: float = 0.0
    ceiling: float = math.inf

    @property
    def silences(self) -> bool:
        return self.leak == 0.0

    @property
    def never_negative(self) -> bool:
        return self.name in ("relu", "relu6", "sigmoid", "hardsigmoid", "softplus")

    @property
    def keeps_zero(self) -> bool:
        return float(self.function(torch.zeros(1))) == 0.0


_TABLE = {
    "relu": Activation("relu", F.relu, 0.0),
    "relu6": Activation("relu6", F.relu6, 0.0, ceiling=6.0),
    "hardswish": Activation("hardswish", F.hardswish, -3.0),
    "hardsigmoid": Activation("hardsigmoid", F.hardsigmoid, -3.0, ceiling=3.0),
    "gelu": Activation("gelu", F.gelu, -4.0, residue=2e-4),
    "quick_gelu": Activation("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x), -6.0, residue=3e-4),
    "silu": Activation("silu", F.silu, -10.0, residue=5e-4),
    "mish": Activation("mish", F.mish, -10.0, residue=5e-4),
    "sigmoid": Activation("sigmoid", torch.sigmoid, -10.0, residue=5e-5, ceiling=10.0),
    "softplus": Activation("softplus", F.softplus, -10.0, residue=5e-5),
    "tanh": Activation("tanh", torch.tanh, -6.0, rest=-1.0, residue=2e-5, ceiling=6.0),
    "elu": Activation("elu", F.elu, -10.0, rest=-1.0, residue=5e-5),
    "selu": Activation("selu", F.selu, -10.0, rest=-1.7580993408473766, residue=1e-4),
    "celu": Activation("celu", F.celu, -10.0, rest=-1.0, residue=5e-5),
}

_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Sigmoid: "sigmoid",
    nn.Softplus: "softplus",
    nn.Tanh: "tanh",
    nn.ELU: "elu",
    nn.SELU: "selu",
    nn.CELU: "celu",
}


# Other packages have their own classes for these functions. Classes with such names are recognised by their values.
_OTHER_NAMES = re.compile("relu|gelu|silu|swish|mish|sigmoid|tanh", re.IGNORECASE)
_VARIANTS: dict[str, list[Callable[[Tensor], Tensor]]] = {"gelu": [partial(F.gelu, approximate="tanh")]}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_known: dict[tuple[type[nn.Module], tuple[tuple[str, str], ...]], str | None] = {}
_SAMPLE = torch.linspace(-8, 8, 120, dtype=torch.float64).view(2, 3, 4, 5)


def leaky_relu(slope: float) -> Activation:
    return Activation("leaky_relu", lambda x: F.leaky_relu(x, slope), 0.0, leak=slope)


def activation_of_module(module: nn.Module) -> Activation | None:
    """The activation a leaf module computes, or None if it is not a known one."""
    if isinstance(module, nn.LeakyReLU):
        return leaky_relu(float(module.negative_slope))
    name = _MODULES.get(type(module)) or _recognised(module)
    if name in ("elu", "celu") and getattr(module, "alpha", 1.0) != 1.0:
        return None
    if name == "softplus" and getattr(module, "beta", 1.0) != 1.0:
        return None
    return _TABLE[name] if name else None


def is_activation(module: nn.Module) -> bool:
    return activation_of_module(module) is not None


def _recognised(module: nn.Module) -> str | None:
    """The activation that another package's class computes, recognised by its values; None if there is none."""
    if type(module).__module__.startswith("torch.") or not _OTHER_NAMES.search(type(module).__name__):
        return None
    if any(module.children()) or module.state_dict():
        return None
    settings = tuple((name, repr(value)) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE)
    if (type(module), settings) not in _known:
        _known[type(module), settings] = _compared(module)
    return _known[type(module), settings]


def _compared(module: nn.Module) -> str | None:
    try:
        with torch.no_grad():
            values = module.forward(_SAMPLE.clone())  # not called as a module, which fx would trace
        if values.shape != _SAMPLE.shape:
            return None
    except Exception:  # another package's code, which may take other arguments
        return None
    functions = ((name, f) for name, own in _TABLE.items() for f in (own.function, *_VARIANTS.get(name, [])))
    return next((name for name, f in functions if torch.allclose(f(_SAMPLE), values, rtol=0, atol=1e-6)), None)


def activation_of_function(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Activation | None:
    """The activation a function or tensor method computes, or None; ``function`` may be a method's name."""
    name = (function if isinstance(function, str) else getattr(function, "__name__", "")).rstrip("_")
    if name == "leaky_relu":
        slope = keywords.get("negative_slope", arguments[1] if len(arguments) > 1 else 0.01)
        return leaky_relu(float(slope))
    shaped = len(arguments) > 1 or any(keywords.get(k, 1.0) != 1.0 for k in ("alpha", "beta"))
    if name in ("elu", "celu", "softplus") and shaped:
        return None  # with arguments other than the defaults they are different functions
    return _TABLE.get(name)
