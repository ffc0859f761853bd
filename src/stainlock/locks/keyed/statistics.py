"""Batch norm's statistics carry nothing: μ goes into β, and σ² into γ.

Behind a gated layer the means solve for the permutation: μ = W'·m[π] is linear in the known means m of the layer's
inputs. What batch norm computes leaves a freedom,

    γ (x − μ)/√(σ² + ε) + β  =  γ' x + β',      γ' = γ/√(σ² + ε),   β' = β − γ' μ,

so that μ := 0 and σ² := 1 − ε say nothing, and the function stays as it is. It is done for every batch norm of the
model: then there is no need to know which ones follow a gate. Batch norms without γ and β have no such freedom.
"""

from __future__ import annotations

from torch import nn

from stainlock.network.norms import Values, affine_of, epsilon, is_batch_norm
from stainlock.plan import Write, write
from stainlock.tensors import has

PART = "statistics"


def statistics_writes(model: nn.Module) -> list[Write]:
    """Writes that move the statistics of every batch norm into its scale and shift."""
    writes = []
    for name, module in model.named_modules():
        if not (is_batch_norm(module) and has(module, "weight") and has(module, "bias")):
            continue
        affine = affine_of(module)
        values: Values = {
            "running_mean": 0.0, "running_var": 1.0 - epsilon(module), "weight": affine.g, "bias": affine.h,
        }  # fmt: skip
        writes += [write(model, f"{name}.{key}" if name else key, (None,), new, PART) for key, new in values.items()]
    return writes
