"""Reading a suspect: its difference from the base, folded onto the chips in one pass.

For every tensor that carries, u = (suspect − base) / (a · scale_row); a client's copy has u = mark. What was done to
the file since adds to u whatever it likes, so u goes through a score function f before it is folded
(`stainlock.fingerprints.scores`): what is common to a tensor, wild values and pruned weights then say nothing, and
tensors count by how well the mark can be told in them. None of this needs to be right: tracing is valid for every y
that was made without the innocent clients' codes.
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
    """What was read: one number for each chip; ``compared`` of the ``carrying`` weights could be laid side by side.

    ``missing`` says of each tensor that could not be compared why. ``blind``: without the base.
    """

    chips: NDArray[np.float64]
    compared: int
    carrying: int
    missing: Mapping[str, str]
    blind: bool = False

    @property
    def reach(self) -> float:
        """The score that an untouched copy would have with so many weights compared, at most."""
        return float(np.sqrt(min(self.compared, len(self.chips))))


def read(suspect: Mapping[str, Tensor], base: Mapping[str, Tensor] | None, layout: Layout) -> Reading:
    """A suspect's weights, laid beside the base's by name; without a base (weaker) they are read as they are."""
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
    """f(u) for every weight of a tensor, zero where it says nothing, and how many say something."""
    suspect = (theirs.dequantize() if theirs.is_quantized else theirs).detach().cpu().float()
    base = torch.zeros_like(suspect) if ours is None else ours.detach().cpu().float()
    steps = (amplitude * row_scales(suspect if ours is None else base)).float().view(-1, *(1,) * (suspect.dim() - 1))
    u = (suspect - base).div_(steps)
    u.masked_fill_(suspect == 0, float("nan"))  # pruned
    return score(u.reshape(-1)), int(torch.isfinite(u).sum())
