"""Batch norm's statistics carry nothing: μ goes into β, and σ² into γ.

Behind a gated layer the means solve for the permutation: μ = W'·m[π] is linear in the known means m of the layer's
inputs. What batch norm computes leaves a freedom,

    γ (x − μ)/√(σ² + ε) + β  =  γ' x + β',      γ' = γ/√(σ² + ε),   β' = β − γ' μ,

so that μ := 0 and σ² := 1 − ε say nothing, and the function stays as it is. It is done for every batch norm of the
model: then there is no need to know which ones follow a gate. Batch norms without γ and β have no such freedom.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from stainlock.network.norms import is_batch_norm, without_statistics
from stainlock.plan import Write, write

PART = "statistics"


def statistics_writes(model: nn.Module) -> list[Write]:
    """Writes that move the statistics of every batch norm into its scale and shift."""
    return [
        # Of the module itself: to look its name up in the whole model for each value takes longer than the rest.
        replace(write(module, key, (None,), value, PART), parameter=f"{name}.{key}" if name else key)
        for name, module in model.named_modules() if is_batch_norm(module)
        for key, value in without_statistics(module).items()
    ]  # fmt: skip
