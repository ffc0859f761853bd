"""Distributions in constant memory. Bins have fixed edges, so it does not matter how data are split into batches.
Values count as their bin's upper edge, so bounds computed from them can only grow."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stainlock.certificates.data_driven import mean_upper_bound
from stainlock.sphere import FloatArray, log_cap

Counts = NDArray[np.int64]

# Norms from 2^−24 to 2^40; a smaller one counts as 2^−24, a larger one is refused.
_PER_OCTAVE, _LOWEST, _HIGHEST = 1024, -24, 40
_ROUNDING = 1 + 1e-6  # covers what single precision loses in a norm
# Mean caps from e^−720, about 1e−313, to 1.
_PER_E, _LOWEST_LOG = 32, -720


class NormHistogram:
    """How often norms occur, to within a 1500th of their size."""

    def __init__(self) -> None:
        self._counts = np.zeros((_HIGHEST - _LOWEST) * _PER_OCTAVE + 1, dtype=np.int64)

    @staticmethod
    def bins(norms: FloatArray) -> Counts:
        with np.errstate(divide="ignore"):
            octaves = np.log2(norms) - _LOWEST
        index: FloatArray = np.ceil(np.maximum(octaves, 0) * _PER_OCTAVE)
        if not np.all(index <= (_HIGHEST - _LOWEST) * _PER_OCTAVE):  # also where a norm is not a number
            raise ValueError(f"expected features with norms up to 2^{_HIGHEST}, got {np.max(norms)}")
        return index.astype(np.int64)

    @staticmethod
    def upper_edges(bins: Counts) -> FloatArray:
        edges: FloatArray = np.exp2(bins / _PER_OCTAVE + _LOWEST) * _ROUNDING
        return edges

    def add(self, bins: Counts) -> None:
        self._counts += np.bincount(bins.reshape(-1), minlength=len(self._counts))

    @property
    def norms(self) -> FloatArray:
        """The upper edges of the bins that occur."""
        return self.upper_edges(np.flatnonzero(self._counts))

    @property
    def counts(self) -> Counts:
        return self._counts[self._counts > 0]


class MeanCaps:
    """Y_i(Δ) = the mean over the windows of image i of cap_d(Δ/‖φ‖): a random detector's chance, for each threshold.

    Images are independent, positions are not: what follows from the Y_i assumes only the former. Thresholds below 0 get
    no bound: Y counts as 1.
    """

    def __init__(self, thresholds: FloatArray, dimension: int) -> None:
        self.thresholds, self.dimension, self.images = thresholds, dimension, 0
        self._log_total = np.full(len(thresholds), -math.inf)
        self._counts = np.zeros((len(thresholds), -_LOWEST_LOG * _PER_E + 1), dtype=np.int64)
        # Logarithms of caps for every bin of norms met so far, one row per bin.
        self._row_of = np.full((_HIGHEST - _LOWEST) * _PER_OCTAVE + 1, -1, dtype=np.int64)
        self._rows = np.empty((0, len(thresholds)))

    def add(self, bins: Counts) -> None:
        """A batch's bins of norms, ``(N, windows)``."""
        images, windows = bins.shape
        present = np.flatnonzero(np.bincount(bins.reshape(-1)))
        logs = self._log_caps(present)
        place = np.zeros(len(self._row_of), dtype=np.int64)
        place[present] = np.arange(len(present))
        compact = place[bins] + np.arange(images)[:, None] * len(present)
        counts = np.bincount(compact.reshape(-1), minlength=images * len(present)).reshape(images, -1)
        top = logs.max(0)
        scale = np.where(np.isfinite(top), top, 0.0)
        # What underflows relative to the batch's largest cap counts as 1e−300 of it.
        sums = np.maximum(counts @ np.exp(logs - scale) / windows, 1e-300)
        log_means = np.where(np.isfinite(top), np.log(sums) + scale, -math.inf)
        self._log_total = np.logaddexp(self._log_total, np.logaddexp.reduce(log_means, axis=0))
        index = np.ceil((np.maximum(log_means, _LOWEST_LOG) - _LOWEST_LOG) * _PER_E).astype(np.int64)
        index = np.minimum(index, self._counts.shape[1] - 1)
        np.add.at(self._counts, (np.arange(len(self.thresholds)), index), 1)
        self.images += images

    def log_mean(self) -> FloatArray:
        """log of the mean of Y: the cap's expectation over images and positions."""
        log_mean: FloatArray = self._log_total - math.log(self.images)
        return log_mean

    def log_union(self, factor: float) -> FloatArray:
        """log of the mean of min(1, factor·Y): a bound if `factor` windows and detectors may each fire."""
        with np.errstate(divide="ignore"):
            capped = np.log([self._values(k, factor)[0] @ self._weights(k) for k in range(len(self.thresholds))])
        return np.minimum(np.minimum(self.log_mean() + math.log(factor), capped), 0.0)

    def upper_bound(self, factor: float, confidence: float) -> FloatArray:
        """An upper bound on the mean of min(1, factor·Y) at `confidence`, images being independent."""
        bounds: list[float] = []
        for k in range(len(self.thresholds)):
            values, most = self._values(k, factor)
            bounds.append(most * mean_upper_bound(values / most, confidence, counts=self._occurring(k)))
        return np.minimum(np.array(bounds, dtype=np.float64), 1.0)

    def _values(self, k: int, factor: float) -> tuple[FloatArray, float]:
        """min(1, factor·Y) of the bins that occur, and the most it can be: Y is at most ½ for thresholds ≥ 0."""
        edges = np.exp(np.flatnonzero(self._counts[k]) / _PER_E + _LOWEST_LOG)
        most = min(1.0, factor / 2 if self.thresholds[k] >= 0 else factor)
        return np.minimum(edges * factor, most), most

    def _occurring(self, k: int) -> Counts:
        counts: Counts = self._counts[k]
        return counts[counts > 0]

    def _weights(self, k: int) -> FloatArray:
        weights: FloatArray = self._occurring(k) / self.images
        return weights

    def _log_caps(self, bins: Counts) -> FloatArray:
        new = bins[self._row_of[bins] < 0]
        if len(new):
            cosines = self.thresholds / NormHistogram.upper_edges(new)[:, None]
            self._row_of[new] = len(self._rows) + np.arange(len(new))
            logs = np.where(self.thresholds < 0, 0.0, log_cap(cosines, self.dimension))
            self._rows = np.concatenate([self._rows, logs])
        return self._rows[self._row_of[bins]]


class ResponseCounts:
    """How many responses exceed each threshold, for several detectors and for the largest of them."""

    def __init__(self, thresholds: FloatArray, detectors: int) -> None:
        self._edges = torch.from_numpy(thresholds)
        self._counts = np.zeros((detectors + 1, len(thresholds) + 1), dtype=np.int64)

    def add(self, responses: Tensor) -> None:
        """``(N, D, P)``."""
        rows, bins = self._counts.shape
        merged = torch.cat([responses, responses.amax(1, keepdim=True)], 1)
        self._counts[:, 0] += merged.shape[0] * merged.shape[2]
        # Only rows that reach the lowest threshold anywhere need to be looked at position by position.
        reaching = (merged.amax(2) > float(self._edges[0])).nonzero()
        if len(reaching):
            values = merged[reaching[:, 0], reaching[:, 1]].cpu().double()
            passed = torch.bucketize(values, self._edges)  # how many thresholds are strictly below the response
            flat = (passed + reaching[:, 1:].cpu() * bins).flatten()
            found = torch.bincount(flat, minlength=rows * bins).view(rows, bins).numpy()
            self._counts += found
            self._counts[:, 0] -= found.sum(1)

    @property
    def each(self) -> Counts:
        """``(D, K)``: exceedances of every detector."""
        return self._exceeding()[:-1]

    @property
    def any(self) -> Counts:
        """``(K,)``: samples in which some detector exceeds."""
        exceeding: Counts = self._exceeding()[-1]
        return exceeding

    def _exceeding(self) -> Counts:
        from_above: Counts = self._counts[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
        return from_above
