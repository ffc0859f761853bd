"""A client's fingerprint, as a plan: every weight that carries gets w + a · scale_row · mark."""

from __future__ import annotations

import torch
from torch import Tensor

from stainlock.fingerprints.layout import Layout, carriers, row_scales
from stainlock.fingerprints.spreading import spread
from stainlock.fingerprints.streams import code
from stainlock.plan import Plan, Replacement
from stainlock.target import Target

FINGERPRINT = "fingerprint"


def fingerprint_plan(base: Target, layout: Layout, client_secret: bytes, *, digest: str | None = None) -> Plan:
    """The plan that turns the base into a client's copy; ``digest`` is the base's, if already known."""
    signs = torch.from_numpy(code(client_secret, layout.chips))
    held = carriers(base.model)
    if {name: tuple(tensor.shape) for name, tensor in held.items()} != dict(layout.shapes):
        raise ValueError("expected the model that the layout was made for, got one with other parameters")
    replacements = [
        Replacement(name, fingerprinted(layout, name, tensor, signs), FINGERPRINT) for name, tensor in held.items()
    ]
    return Plan(base=digest, replacements=tuple(replacements))


def fingerprinted(layout: Layout, name: str, tensor: Tensor, signs: Tensor) -> Tensor:
    """One tensor of a client's copy, in the dtype of the base's; ``signs`` is the client's code.

    Float32 is enough for the mark, which is a percent of the weights. A row with a value that is not finite is not
    marked.
    """
    base = tensor.detach().cpu()
    wide = torch.promote_types(base.dtype, torch.float32)
    steps = (layout.amplitude_of(name) * row_scales(base)).to(wide).view(-1, *(1,) * (base.dim() - 1))
    return spread(layout, name, signs).to(wide).mul_(steps).add_(base).to(base.dtype)
