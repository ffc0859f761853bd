"""Streaming statistics of a site's features and of many detectors' responses: one pass, constant memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stainlock.certificates.histograms import MeanCaps, NormHistogram, ResponseCounts
from stainlock.certificates.law import Law
from stainlock.certificates.windows import Windows, windows_of
from stainlock.network.network import Site, layer_input
from stainlock.sphere import FloatArray
from stainlock.target import Target, evaluation_mode


@dataclass(frozen=True)
class Moments:
    """What Theorem 1 needs to know about the features: ‖μ‖ and tr C, estimated from the windows seen."""

    mean_norm: float
    trace: float
    mean_square: float

    def constant(self, dtype: torch.dtype) -> bool:
        """Whether the features vary no more than rounding errors do."""
        return self.trace <= 100 * torch.finfo(dtype).eps * self.mean_square


class Statistics:
    """Add batches of pixels; read the statistics at any time.

    Windows do not overlap, as in the paper, or with ``overlapping`` all are used. Responses are counted by position,
    and by image, where a detector's largest response counts. If detectors belong to different groups of a grouped
    convolution, a sample of features is a position and the group of a random one of these detectors.

    ``thresholds`` must be known beforehand, in any number and increasing: only which of them a response exceeds is
    stored. ``law`` says how the detectors were drawn; by default uniformly from the sphere.
    """

    def __init__(
        self,
        target: Target,
        site: Site,
        detectors: Tensor,
        thresholds: Sequence[float] | FloatArray,
        *,
        groups: Sequence[int] | None = None,
        overlapping: bool = False,
        law: Law | None = None,
    ) -> None:
        self.law = law or Law(site.dimension)
        self.target, self.site, self.overlapping = target, site, overlapping
        self.thresholds = np.asarray(thresholds, dtype=np.float64).reshape(-1)
        if not len(self.thresholds) or not np.all(np.diff(self.thresholds) > 0) or np.any(np.isnan(self.thresholds)):
            raise ValueError(f"expected increasing thresholds, got {thresholds}")
        if detectors.dim() != 2 or detectors.shape[1] != site.dimension or not len(detectors):
            raise ValueError(f"expected detectors (D, {site.dimension}), got {tuple(detectors.shape)}")
        self.detectors = detectors
        self.groups = [0] * len(detectors) if groups is None else list(groups)
        if len(self.groups) != len(detectors) or not all(0 <= g < site.groups for g in self.groups):
            raise ValueError(f"expected a group below {site.groups} for each of {len(detectors)} detectors")
        alike = len({self.groups.count(group) for group in self.groups}) == 1
        self._feature_groups = sorted(set(self.groups)) if alike else self.groups
        self.images = 0
        self.positions = 0  # per image
        self.norms = NormHistogram()
        self.caps = MeanCaps(self.free_thresholds, self.law.dimension)
        self.by_position = ResponseCounts(self.thresholds, len(detectors))
        self.by_image = ResponseCounts(self.thresholds, len(detectors))
        self.maxima = torch.full((len(detectors),), -math.inf, dtype=torch.float64)
        self._total: Tensor | None = None
        self._last: Windows | None = None
        self._square_sum = 0.0

    @property
    def free_thresholds(self) -> FloatArray:
        """The thresholds for the random part of a detector, as a unit vector."""
        return self.thresholds / self.law.size

    @property
    def samples(self) -> int:
        """The total number of windows, for each detector."""
        return self.images * self.positions

    def add(self, pixels: Tensor) -> None:
        """Add a batch of pixels ``(N, *input_shape)``."""
        with evaluation_mode(self.target.model), torch.no_grad():
            self.add_features(layer_input(self.target, self.site, pixels), len(pixels))

    def add_features(self, features: Tensor, images: int) -> None:
        """Add a batch of images by the layer's input."""
        windows = windows_of(self.target, self.site, features, images, overlapping=self.overlapping)
        responses = self._responses(windows)
        self.positions = responses.shape[2]
        self.images += images
        if not self.overlapping:  # overlapping positions are costly to count, and then only images matter
            self.by_position.add(responses)
        largest = responses.amax(2, keepdim=True)
        self.by_image.add(largest)
        self.maxima = torch.maximum(self.maxima, largest.amax((0, 2)).cpu().double())
        self._add_norms(windows)
        total = windows.total()
        self._total = total if self._total is None else self._total + total
        self._last = windows

    def add_all(self, batches: Iterable[Tensor]) -> Statistics:
        for pixels in batches:
            self.add(pixels)
        return self

    def mean(self) -> Tensor:
        """μ, over all windows: float64 ``(d,)``."""
        if self._last is None or self._total is None:
            raise ValueError("expected at least 2 samples, got 0")
        sums = [self._last.sum_of(self._total, group) for group in self._feature_groups]
        return torch.stack(sums).mean(0) / self.samples

    def moments(self) -> Moments:
        """‖μ‖ and tr C = E‖φ‖² − ‖μ‖²."""
        mean_norm = float(self.mean().norm())
        mean_square = self._square_sum / (self.samples * len(self._feature_groups))
        return Moments(mean_norm, max(0.0, mean_square - mean_norm**2), mean_square)

    def _responses(self, windows: Windows) -> Tensor:
        if len(set(self.groups)) == 1:
            return windows.responses(self.detectors, self.groups[0])
        each = [windows.responses(v[None], group) for v, group in zip(self.detectors, self.groups, strict=True)]
        return torch.cat(each, 1)

    def _add_norms(self, windows: Windows) -> None:
        norms = torch.cat([windows.norms(group) for group in self._feature_groups], 1).cpu().double().numpy()
        bins = self.norms.bins(norms)
        self.norms.add(bins)
        self.caps.add(bins)
        self._square_sum += float(np.square(norms).sum())
