"""Channels that were mixed with one another: a tensor times an unknown matrix.

If only linear layers and sums touch a stream of channels (the residual stream of a transformer, the narrow ends of
inverted residuals), a thief can transform it by any invertible matrix M that the next layers undo. A layer that reads
the stream then becomes S = W M, one that writes it S = M W. With at least twice as many rows as columns, M is found by
least squares, and S M⁻¹ = W + mark − (the mark's projection onto the columns of W): with R rows and C columns, a
share (R − C)/R of the mark remains.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TALL = 2  # times as many rows as columns, at least
_LARGEST = 2048  # columns: the time to solve grows with their cube
_LEFT = 0.4  # largest ‖S M⁻¹ − W‖ / ‖W‖ accepted; unrelated tensors are far above 1


def unmixed(theirs: Tensor, ours: Tensor) -> Tensor | None:
    """The suspect's tensor with the mixing of its inputs or outputs undone; None if that does not give the base's."""
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
