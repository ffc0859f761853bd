"""How much a difference says about the mark: the score function of the differences themselves.

If the mark is small compared with everything else that was done to a tensor, the best statistic is the sum of
f(u)·mark with

    f(u) = −(log p)'(u)

where p is the density of u (the locally most powerful test). The density is estimated from the tensor itself, by a
smoothed histogram. For normal noise f is a line, steeper the less noise there is, so tensors are weighted by what they
reveal. A shift of all weights is removed, and far outliers get 0. If weights were moved to one of two sides, as by
taking the minimum or maximum of many copies, each side has its own centre. For an untouched copy f(u) = u.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_BINS = 512
_REACH = 6.0  # half-width of the histogram around the median, in units of the spread
_SAMPLE = 1 << 19  # weights per tensor from which the density is estimated, about
_AT_ONCE = 1 << 18  # weights per step: intermediate values stay in the processor's cache
_NARROWEST, _WIDEST = 0.06, 0.4  # limits of the smoothing kernel's standard deviation, in units of the spread
_NORMAL = 1.4826  # standard deviation of a normal distribution divided by its median absolute deviation


def score(u: Tensor) -> Tensor:
    """f(u) for a vector of values; zero for those that are not finite."""
    sample = u[:: max(1, len(u) // _SAMPLE)]
    sample = sample[torch.isfinite(sample)]
    if len(sample) < 2:
        return torch.zeros_like(u)
    centre = float(sample.median())
    spread = _NORMAL * float((sample - centre).abs().median()) or float(sample.std())
    if not 0 < spread < float("inf"):  # the base itself: nothing to read
        return torch.zeros_like(u)
    width = 2 * _REACH * spread / _BINS
    start = centre - _REACH * spread
    counts = torch.bincount(_bins(sample, start, width).long(), minlength=_BINS + 2)[1:-1].double()
    smoothing = min(_WIDEST, max(_NARROWEST, len(sample) ** -0.2)) * spread / width
    table = F.pad(_slope(counts, smoothing) / width, (1, 1)).to(u.dtype)
    return torch.cat([table.index_select(0, _bins(part, start, width)) for part in u.split(_AT_ONCE)])


def _bins(u: Tensor, start: float, width: float) -> Tensor:
    """1 … 512 for values within reach, 0 and 513 for those below and above, 0 for those that are not finite."""
    places = (u - start).div_(width).add_(1).nan_to_num_(nan=0.0)
    return places.clamp_(0, _BINS + 1).to(torch.int32)


def _slope(counts: Tensor, deviation: float) -> Tensor:
    """−(log p)' per bin of a histogram, smoothed by a normal kernel with this standard deviation in bins."""
    reach = int(4 * deviation) + 1
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
    kernel = torch.exp(-0.5 * (offsets / deviation) ** 2)
    kernel /= kernel.sum()
    padded = counts.view(1, 1, -1)
    density = F.conv1d(padded, kernel.view(1, 1, -1), padding=reach).flatten()
    change = F.conv1d(padded, (offsets / deviation**2 * kernel).view(1, 1, -1), padding=reach).flatten()
    floor = 1e-3 * float(density.max())  # a few far outliers don't give a reliable density
    return -change / (density + floor)
