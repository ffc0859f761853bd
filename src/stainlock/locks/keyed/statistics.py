"""Removes the statistics of batch norms: μ is folded into β, and σ² no longer depends on the layer's outputs.

After a gated layer the means would reveal the permutation: μ = W'·m[π] is linear in the known means m of the layer's
inputs. But batch norm can compute the same function without them,

    γ (x − μ)/√(σ² + ε) + β  =  γ' x + β',      γ' = γ/√(σ² + ε),   β' = β − γ' μ,

with μ := 0, and with σ² and γ that follow from γ' alone: they reveal nothing that the function does not. This is done
for every batch norm of the model, so there is no need to know which ones follow a gate. It can't be done for batch
norms without γ and β.
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
        # Written to the module: looking up its name in the whole model for each value takes longer than the rest.
        replace(write(module, key, (None,), value, PART), parameter=f"{name}.{key}" if name else key)
        for name, module in model.named_modules() if is_batch_norm(module)
        for key, value in without_statistics(module).items()
    ]  # fmt: skip
