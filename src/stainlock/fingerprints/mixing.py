"""Channels that were mixed with one another: a tensor times an unknown matrix.

Where nothing but linear layers and sums touch a stream of channels (the residual stream of a transformer, the narrow
ends of inverted residuals), a thief can turn it by any matrix M that the next layers undo. Of a layer that reads it the
suspect then has S = W M, of one that writes it S = M W. With at least twice as many rows as columns, M is found by
least squares, and S M⁻¹ = W + mark − (what of the mark lies in W's own columns): of R rows and C columns (R − C)/R
of the mark are left.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TALL = 2  # times as many rows as columns
_LARGEST = 2048  # columns: solving takes their cube
_LEFT = 0.4  # of W that M may fail to explain; of an unrelated tensor, with twice as many rows, it is 0.7


def unmixed(theirs: Tensor, ours: Tensor) -> Tensor | None:
    """The suspect's tensor with its inputs' or outputs' mixture undone; None where it is none."""
    if theirs.shape != ours.shape or not bool(torch.isfinite(theirs).all()):
        return None
    for axis in (1, 0):
        a, b = (t.movedim(axis, -1).reshape(-1, t.shape[axis]) for t in (ours, theirs))
        if a.shape[1] < 2 or a.shape[1] > _LARGEST or a.shape[0] < _TALL * a.shape[1]:
            continue
        mixture = torch.linalg.lstsq(a, b).solution
        inverse, failed = torch.linalg.inv_ex(mixture)
        if int(failed) or not bool(torch.isfinite(inverse).all()):
            continue
        found = b @ inverse
        if float((found - a).norm()) < _LEFT * float(a.norm()):
            told_apart: Tensor = found.view(ours.movedim(axis, -1).shape).movedim(-1, axis)
            return told_apart
    return None
