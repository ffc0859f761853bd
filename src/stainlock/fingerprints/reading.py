"""Reading a suspect: its difference from the base, folded onto the chips in one pass.

For every tensor that carries, u = (suspect − base) / (a · scale_row); a client's copy has u = mark. Whatever was done
to the file since is added to u, so u goes through a score function f before it is folded
(`stainlock.fingerprints.scores`). Shifts common to a tensor, outliers and pruned weights then contribute nothing, and
tensors are weighted by how well the mark can be read in them. None of this needs to be right: tracing is valid for
every y that was made without the innocent clients' codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stainlock.fingerprints.layout import Layout, row_scales
from stainlock.fingerprints.scores import score
from stainlock.fingerprints.spreading import fold


@dataclass(frozen=True)
class Reading:
    """One number per chip. ``compared`` of the ``carrying`` weights could be compared with the base.

    ``missing`` says, for each tensor that could not be compared, why. ``blind``: read without the base.
    """

    chips: NDArray[np.float64]
    compared: int
    carrying: int
    missing: Mapping[str, str]
    blind: bool = False

    @property
    def reach(self) -> float:
        """About the highest score that an untouched copy can have with this many weights compared."""
        return float(np.sqrt(min(self.compared, len(self.chips))))


def read(suspect: Mapping[str, Tensor], base: Mapping[str, Tensor] | None, layout: Layout) -> Reading:
    """Read a suspect's weights against the base's by name; without a base (weaker) they are read as they are."""
    chips = torch.zeros(layout.chips, dtype=torch.float64)
    compared, missing = 0, {}
    for name, shape in layout.shapes.items():
        theirs, ours = suspect.get(name), None if base is None else base.get(name)
        if base is not None and (ours is None or tuple(ours.shape) != shape):
            raise ValueError(f"expected the base's {name} with shape {shape}, got another base")
        if theirs is None:
            missing[name] = "not there"
        elif tuple(theirs.shape) != shape:
            missing[name] = f"shape {tuple(theirs.shape)} where the base has {shape}"
        elif not (theirs.is_floating_point() or theirs.is_quantized):
            missing[name] = f"type {theirs.dtype}"
        else:
            values, used = _scored(theirs, ours, layout.amplitude_of(name))
            compared += used
            if used:
                chips += fold(layout, name, values)
            else:
                missing[name] = "no weights that are finite and not zero"
    return Reading(chips.numpy(), compared, layout.weights, missing, base is None)


def _scored(theirs: Tensor, ours: Tensor | None, amplitude: float) -> tuple[Tensor, int]:
    """f(u) for every weight of a tensor, zero for unusable ones, and the number of usable weights."""
    suspect = (theirs.dequantize() if theirs.is_quantized else theirs).detach().cpu().float()
    base = torch.zeros_like(suspect) if ours is None else ours.detach().cpu().float()
    steps = (amplitude * row_scales(suspect if ours is None else base)).float().view(-1, *(1,) * (suspect.dim() - 1))
    u = (suspect - base).div_(steps)
    u.masked_fill_(suspect == 0, float("nan"))  # pruned
    return score(u.reshape(-1)), int(torch.isfinite(u).sum())
