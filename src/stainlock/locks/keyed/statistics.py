"""Batch norm's statistics carry nothing: μ goes into β, and σ² into γ.

Behind a gated layer the means solve for the permutation: μ = W'·m[π] is linear in the known means m of the layer's
inputs. What batch norm computes leaves a freedom,

    γ (x − μ)/√(σ² + ε) + β  =  γ' x + β',      γ' = γ/√(σ² + ε),   β' = β − γ' μ,

so that μ := 0 and σ² := 1 − ε say nothing, and the function stays as it is. It is done for every batch norm of the
model: then there is no need to know which ones follow a gate. Batch norms without γ and β have no such freedom.
"""

from __future__ import annotations

from torch import nn

from stainlock.plan import Write, write
from stainlock.tensors import exact, has

PART = "statistics"
_STATISTICS, _AFFINE = ("running_mean", "running_var"), ("weight", "bias")


def statistics_writes(model: nn.Module) -> list[Write]:
    """Writes that move the statistics of every batch norm into its scale and shift."""
    writes = []
    for name, module in model.named_modules():
        if not _is_movable(module):
            continue
        eps = float(getattr(module, "eps", 0.0))
        scale = exact(module, "weight") / (exact(module, "running_var") + eps).sqrt()
        values = {
            "running_mean": 0.0,
            "running_var": 1.0 - eps,
            "weight": scale,
            "bias": exact(module, "bias") - scale * exact(module, "running_mean"),
        }
        writes += [write(model, f"{name}.{key}" if name else key, (None,), new, PART) for key, new in values.items()]
    return writes


def _is_movable(module: nn.Module) -> bool:
    """A batch norm in fact, whatever its class: torchvision's frozen ones have buffers of the same names."""
    return all(has(module, name) for name in (*_STATISTICS, *_AFFINE)) and hasattr(module, "eps")
