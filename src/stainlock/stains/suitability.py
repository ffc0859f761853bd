"""Which site suits a detector: how many directions natural features use there, and how far a trigger stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stainlock.certificates.geometric import cantelli, theorem1
from stainlock.certificates.statistics import Statistics
from stainlock.certificates.windows import windows_of
from stainlock.errors import SiteError
from stainlock.network.network import Network, Site
from stainlock.network.norms import response_variance
from stainlock.numerics import sample_sphere
from stainlock.sphere import log_cap
from stainlock.stains.choice import rank_channels
from stainlock.stains.detector import FIRING_FRACTION
from stainlock.target import Target, evaluation_mode, synthetic_inputs
from stainlock.trigger import Trigger, find_triggers

Progress = Callable[[int, int], None]
_SYNTHETIC = 16  # images, if no data are given
_WINDOWS = 16  # per image, for the PCA dimension
# If only a variance is known, natural responses are assumed to reach this many standard deviations, and norms this many
# times their root mean square: somewhat more than for photographs on the models we tried.
_DEVIATIONS, _SPREAD_OF_NORMS = 4.0, 1.5
_GOOD_MARGIN = 2.0
_RARE = -5.0  # log10 of the chance per position


@dataclass(frozen=True)
class Suitability:
    """What an owner wants to know about a site before choosing it.

    - ``pca_dimension``: tr(C)²/‖C‖_F², how many directions the features' variance is spread over (of ``dimension``).
    - ``margin``: a quickly found trigger's response divided by the largest natural one; more steps increase it.
    - ``bounds``: on the chance that a random detector fires at a natural position, at a threshold of the firing
      fraction times the trigger's response; estimates, from few images.
    - ``source``: where the natural features come from.
    """

    site: str
    dimension: int
    pca_dimension: float
    trigger_response: float
    natural_response: float
    margin: float
    bounds: dict[str, float]
    log10_cap: float | None
    source: str


def suitability(
    network: Network,
    batches: Iterable[Tensor] | None = None,
    *,
    sites: Sequence[str] | None = None,
    detectors: int = 3,
    steps: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Suitability]:
    """Measure every site that can carry a silent detector (or the ones named), on batches of natural pixels.

    Without data, features are those of synthetic inputs. If a batch norm follows the site, its training statistics
    then give the variance of random detectors' responses: the mean of σ²/‖w_k‖² over its channels, w_k being the
    layer's rows, instead of tr(C)/d.
    """
    target = network.target
    names = [s.name for s in network.sites.values() if s.problem is None] if sites is None else list(sites)
    chosen = [network.site(name) for name in names]
    if not chosen:
        raise SiteError("no site of this model can carry a silent detector: see stainlock inspect")
    pixels = [synthetic_inputs(target, _SYNTHETIC, torch.Generator().manual_seed(seed))] if batches is None else batches
    probes = []
    for done, site in enumerate(chosen):
        generator = np.random.default_rng(seed)
        vectors = sample_sphere(detectors, site.dimension, generator=generator)
        noise = torch.Generator().manual_seed(seed)
        # In a grouped convolution, the inputs of the channel that a stain would take.
        group = 0 if site.groups == 1 else site.group_of(_first_channel(network, site))
        triggers = find_triggers(target, site, vectors, generator=noise, group=group, steps=steps)
        probes.append(_Probe(target, site, vectors, triggers, group))
        if progress:
            progress(done + 1, len(chosen))
    for batch in pixels:
        _read(target, probes, batch)
    return [probe.result(synthetic=batches is None) for probe in probes]


def _first_channel(network: Network, site: Site) -> int:
    return rank_channels(network, site, "outgoing", folded=False, live=False)[0]


def recommend(network: Network, found: Sequence[Suitability], chosen: str | None = None) -> str:
    """One line: what was measured at the ``chosen`` site, which `stain` takes, and where the trigger stands out most.

    `stain` takes the cheapest channel among sites with a good dimension and a small patch. Without a ``chosen`` site
    the line is about the widest margin among sites where false positives are rare.
    """
    rare = [s for s in found if s.log10_cap is None or s.log10_cap <= _RARE]
    widest = max(rare or found, key=lambda s: s.margin)
    best = next((s for s in found if s.site == chosen), widest)
    if widest.margin < _GOOD_MARGIN:
        at = f"even at the best, {widest.site}, the trigger is only {widest.margin:.1f}× the natural responses"
        return f"no site stands out: {at}"
    patch = "×".join(map(str, network.site(best.site).searched)) or "whole input"
    chance = "0" if best.log10_cap is None else f"1e{best.log10_cap:.0f}"
    verdict = "recommended" if rare else "the best, though false positives are not rare"
    told = (
        f"{verdict}: {best.site}, dimension {best.dimension} (PCA {best.pca_dimension:.0f}), trigger"
        f" {best.margin:.1f}× the largest natural response, false positives about {chance} per position, patch {patch}"
    )
    if best is widest:
        return told
    return f"{told}; the trigger stands out most at {widest.site} ({widest.margin:.1f}×)"


class _Probe:
    """What is measured at one site."""

    def __init__(self, target: Target, site: Site, vectors: Tensor, triggers: list[Trigger], group: int) -> None:
        self.target, self.site, self.group = target, site, group
        self.response = min(trigger.response for trigger in triggers)
        self.threshold = FIRING_FRACTION * self.response
        self.statistics = Statistics(target, site, vectors, [self.threshold], groups=[group] * len(vectors))
        self._windows: list[Tensor] = []

    def add(self, features: Tensor, images: int) -> None:
        self.statistics.add_features(features, images)
        if sum(len(windows) for windows in self._windows) < 32:  # images are enough
            windows = windows_of(self.target, self.site, features, images, overlapping=False)
            positions = self.statistics.positions
            places = torch.linspace(0, positions - 1, min(_WINDOWS, positions)).long()
            self._windows.append(windows.vectors(places, self.group).cpu().double())

    def result(self, *, synthetic: bool) -> Suitability:
        moments = self.statistics.moments()
        natural = float(self.statistics.maxima.max())
        trace, source = moments.trace, "synthetic inputs" if synthetic else "data"
        recorded = _recorded_variance(self.target, self.site) if synthetic else None
        log_chance = float(self.statistics.caps.log_mean()[0])
        if recorded is not None:
            trace = self.site.dimension * recorded
            natural = max(natural, _DEVIATIONS * math.sqrt(recorded))
            norm = _SPREAD_OF_NORMS * math.hypot(math.sqrt(trace), moments.mean_norm)
            log_chance = max(log_chance, log_cap(self.threshold / norm, self.site.dimension))
            source = "batch norm and synthetic inputs"
        log10_cap = log_chance / math.log(10)
        facts = {"trace": trace, "mean_norm": moments.mean_norm, "dimension": self.site.dimension}
        bounds = {
            "theorem1": theorem1(self.threshold, **facts),  # type: ignore[arg-type]
            "cantelli": cantelli(self.threshold, **facts),  # type: ignore[arg-type]
            "cap": max(math.exp(log_chance), 1e-300),
        }
        margin = self.response / max(natural, 1e-30)
        return Suitability(
            self.site.name, self.site.dimension, participation_ratio(torch.cat(self._windows)), self.response, natural,
            margin, bounds, log10_cap if math.isfinite(log10_cap) else None, source,
        )  # fmt: skip


def participation_ratio(windows: Tensor) -> float:
    """tr(C)²/‖C‖_F² from windows ``(images, windows, d)``, without the d×d matrix.

    For independent centred a and b, ‖C‖_F² = E[(a·b)²]: the mean square of the Gram matrix's entries between different
    images. Its diagonal gives tr C. Neither is biased by d being larger than the sample.
    """
    images, each, dimension = windows.shape
    if images < 2:
        raise ValueError(f"expected at least 2 images, got {images}")
    centred = (windows - windows.mean((0, 1))).flatten(0, 1)
    gram = centred @ centred.T
    image = torch.arange(images).repeat_interleave(each)
    apart = image[:, None] != image[None, :]
    squared_trace = float(gram.diagonal().mean()) ** 2
    frobenius = float(gram[apart].square().mean())
    if frobenius <= 1e-12 * squared_trace or squared_trace == 0:
        return 1.0 if squared_trace == 0 else float(dimension)
    return min(max(squared_trace / frobenius, 1.0), float(dimension))


def _recorded_variance(target: Target, site: Site) -> float | None:
    """The mean over channels of σ²/‖w_k‖²: the variance of a unit row's responses in training."""
    if site.norm is None or site.kind == "transposed":
        return None
    return response_variance(target.model.get_submodule(site.norm), site.rows(target.model))


def _read(target: Target, probes: Sequence[_Probe], pixels: Tensor) -> None:
    """One forward pass of the whole model, in which every probe reads its layer's input."""
    with evaluation_mode(target.model), torch.no_grad(), _listening(target, probes, len(pixels)):
        if target.part:
            target.traced(target.normalise(pixels))
        else:
            target.predict(pixels)


@contextmanager
def _listening(target: Target, probes: Sequence[_Probe], images: int) -> Iterator[None]:
    def listener(probe: _Probe) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, given: probe.add(given[0], images)

    handles = [p.site.layer(target.model).register_forward_pre_hook(listener(p)) for p in probes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
