"""Changes that models undergo in deployment: half precision, pruning, folding of batch norms."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from stainlock.gating.structure import Structure, file_view
from stainlock.network.network import analyse
from stainlock.numerics import raw
from stainlock.target import Target


def half_precision(target: Target) -> Target:
    """Every weight rounded to 16 bits; the model still runs in 32 bits, which is faster on a CPU."""
    changed = target.copy()
    changed.model.half().float()
    return changed


def pruned(target: Target, share: float) -> Target:
    """Sets a share of the weights to zero: the smallest ones of all convolutions and linear layers taken together."""
    changed = target.copy()
    weights = [raw(m, "weight") for m in changed.model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    sizes = torch.cat([weight.abs().flatten() for weight in weights])
    threshold = sizes.kthvalue(int(share * len(sizes))).values
    for weight in weights:
        weight[weight.abs() <= threshold] = 0
    return changed


def folded(target: Target) -> tuple[Target, int]:
    """Each batch norm folded into the convolution before it, as for deployment; and how many were."""
    plain = target if Structure.of(target) is None else file_view(target)  # gates do not change which norm follows
    norms = {site.name: site.norm for site in analyse(plain).sites.values() if site.norm is not None}
    changed = target.copy()
    for convolution, norm in norms.items():
        before, after = changed.model.get_submodule(convolution), changed.model.get_submodule(norm)
        if isinstance(before, nn.Conv2d) and isinstance(after, nn.BatchNorm2d):
            _replace(changed.model, convolution, fuse_conv_bn_eval(before, after))
            # timm's batch norms apply the activation too: keep it.
            _replace(changed.model, norm, getattr(after, "act", nn.Identity()))
    return changed, _batch_norms(target.model) - _batch_norms(changed.model)


def _batch_norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module.train(False))


def largest_difference(one: Target, other: Target, pixels: torch.Tensor) -> float:
    """The largest difference between the outputs of two models."""
    with torch.inference_mode():
        return float((one.predict(pixels) - other.predict(pixels)).abs().max())
