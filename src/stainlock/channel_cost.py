"""Which channel to give up: how much a layer's readers would miss each one, without any data.

Behind batch norm a channel's pre-activation has mean β and deviation γ, so the mean and spread of what its
readers are given follow; elsewhere a few synthetic inputs stand in for the statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from stainlock.network.activations import Activation
from stainlock.network.graph import Reader, is_batch_norm
from stainlock.network.sites import Analysis, Site, layer_input
from stainlock.plan import Write, write
from stainlock.target import evaluation_mode
from stainlock.tensors import exact, has
from stainlock.trigger import synthetic_inputs

Choice = Literal["l1", "outgoing"]
_POINTS, _WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(64))
_PROBES = 4
_LIVE = 0.5
_NEVER = 8.0  # deviations below the threshold
_FIRED = 10.0  # a detector's level, where only its sign matters


@dataclass(frozen=True)
class Affine:
    """The map ``p = g·y + h`` of a batch norm, channel by channel, in float64; the identity where there is none."""

    g: Tensor
    h: Tensor
    mean: Tensor  # of p over natural inputs, as the running statistics have it
    deviation: Tensor


def affine_of(norm: nn.Module) -> Affine:
    variance, running = exact(norm, "running_var"), exact(norm, "running_mean")
    gamma = exact(norm, "weight") if has(norm, "weight") else torch.ones_like(variance)
    beta = exact(norm, "bias") if has(norm, "bias") else torch.zeros_like(variance)
    scale = gamma / torch.sqrt(variance + float(getattr(norm, "eps", 0.0)))
    # Where the variance is next to nothing, eps keeps the output from spreading as far as γ.
    return Affine(scale, beta - scale * running, beta, scale.abs() * variance.sqrt())


def l1_norms(analysis: Analysis, site: Site) -> Tensor:
    """The paper's choice: the ℓ1 norm of each channel's weights."""
    weight = exact(site.layer(analysis.target.model), "weight")
    if site.kind == "transposed":
        weight = weight.transpose(0, 1)
    return weight.flatten(1).abs().sum(1)


def outgoing_harm(
    analysis: Analysis, site: Site, *, folded: bool, moments: tuple[Tensor, Tensor] | None = None
) -> Tensor | None:
    """Root mean square of what readers lose when a channel falls silent; None where no reader is known.

    ``folded`` counts only what is left after the mean loss went into the readers' biases; ``moments`` are those of
    `site_moments`, where they are at hand.
    """
    if not site.readers or site.activation is None:
        return None
    total = torch.zeros(site.channels, dtype=torch.float64)
    moments = site_moments(analysis, site) if moments is None else moments
    for reader in site.readers:
        lost_mean, lost_deviation = _loss(analysis, site, reader, moments)
        missed = lost_deviation**2 + (0 if folded else lost_mean**2)
        total += missed * _column_energy(analysis, site, reader)
    return total.sqrt()


def rank_channels(analysis: Analysis, site: Site, choice: Choice, *, folded: bool, live: bool) -> list[int]:
    """Channels from the one that will be missed least; ℓ1 norms decide where readers are unknown.

    Channels that never fire, and yet would if the right thing came, are someone's detectors: they come last, so that a
    second stain or a lock leaves the first stain alone. ``live`` leaves out channels far smaller than the others: a
    detector added to one of those hides behind nothing.
    """
    if choice not in ("l1", "outgoing"):
        raise ValueError(f"expected choice 'l1' or 'outgoing', got {choice!r}")
    moments = site_moments(analysis, site)
    harm = outgoing_harm(analysis, site, folded=folded, moments=moments) if choice == "outgoing" else None
    norms = l1_norms(analysis, site)
    if harm is None:
        harm = norms
    alive = norms >= _LIVE * norms.median()
    if site.norm is not None:
        scales = affine_of(analysis.target.model.get_submodule(site.norm)).g.abs()
        alive &= (scales >= _LIVE * scales.median()) & (scales <= scales.median() / _LIVE)
    taken = _waiting(analysis, site, moments)
    # Equal harm (dead channels) is decided by the norm, then by the index.
    order = sorted(range(site.channels), key=lambda k: (bool(taken[k]), float(harm[k]), float(norms[k]), k))
    return [k for k in order if alive[k]] if live else order


def _waiting(analysis: Analysis, site: Site, moments: tuple[Tensor, Tensor]) -> Tensor:
    """Channels that are silent by their threshold alone, far beyond their spread: a dead one has no row to speak of."""
    mean, deviation = moments
    rows = site.rows(analysis.target.model).detach().double().cpu()
    slopes = rows.reshape(site.channels, -1).norm(dim=1)
    if site.norm is not None:
        slopes = slopes * affine_of(analysis.target.model.get_submodule(site.norm)).g.abs()
    below = 0.0 if site.activation is None else site.activation.silent_below
    waiting: Tensor = (below - mean > _NEVER * deviation) & (slopes >= _LIVE / 2 * slopes.median())
    return waiting


def fold_loss(analysis: Analysis, site: Site, resting: dict[int, float]) -> list[Write]:
    """Writes that put channels' expected contributions into their readers' biases.

    ``resting`` says, for each channel given up, what it will rest at; the difference is what readers miss. Where no
    batch norm has statistics of the channel biases stay: a mean over synthetic inputs did more harm than good.
    """
    model = analysis.target.model
    writes = []
    moments = site_moments(analysis, site)
    for reader in site.readers:
        if site.norm is None and not any(isinstance(step, str) and _is_norm(model, step) for step in reader.path):
            continue
        layer = model.get_submodule(reader.module)
        missing: Tensor | float = 0.0
        for channel, rest in resting.items():
            lost, _ = _loss(analysis, site, reader, moments, rest)
            columns = _columns(layer, reader, channel)
            missing = missing + columns.sum(tuple(range(1, columns.dim()))) * lost[channel]
        norm = analysis.sites[reader.module].norm if reader.module in analysis.sites else None
        if has(layer, "bias"):
            writes.append(write(model, f"{reader.module}.bias", (None,), exact(layer, "bias") + missing, "fold"))
        elif norm is not None:
            running = exact(model.get_submodule(norm), "running_mean") - missing
            writes.append(write(model, f"{norm}.running_mean", (None,), running, "fold"))
    return writes


def _is_norm(model: nn.Module, name: str) -> bool:
    return is_batch_norm(model.get_submodule(name))


def site_moments(analysis: Analysis, site: Site) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the site's pre-activations over natural inputs."""
    model = analysis.target.model
    if site.norm is not None:
        affine = affine_of(model.get_submodule(site.norm))
        return affine.mean, affine.deviation
    inputs = synthetic_inputs(analysis.target, _PROBES, torch.Generator().manual_seed(0))
    with evaluation_mode(model), torch.no_grad():
        output = site.layer(model)(layer_input(analysis.target, site, inputs)).double().cpu()
    axis = -1 if site.kind == "linear" else 1
    flat = output.movedim(axis, 0).flatten(1)
    return flat.mean(1), flat.std(1)


def _loss(
    analysis: Analysis, site: Site, reader: Reader, moments: tuple[Tensor, Tensor], rest: float | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and deviation, for each channel, of what the reader is given now less what a silent channel gives."""
    assert site.activation is not None
    model = analysis.target.model
    (mean, deviation), resting = (
        moments,
        torch.full_like(moments[0], site.activation.rest if rest is None else rest),
    )
    mean, deviation = _through_activation(site.activation, mean, deviation)
    for step in reader.path:
        if isinstance(step, Activation):
            mean, deviation = _through_activation(step, mean, deviation)
            resting = step.function(resting)
        elif is_batch_norm(module := model.get_submodule(step)):
            affine = affine_of(module)
            own = _own(affine, reader, len(mean))
            resting = own.g * resting + own.h
            mean, deviation = own.mean, own.deviation
        else:  # a depthwise kernel: its sum carries constants, its size the rest
            kernels = exact(module, "weight").flatten(1)
            own_kernels = kernels[_span(reader, len(mean))]
            resting, mean = own_kernels.sum(1) * resting, own_kernels.sum(1) * mean
            deviation = own_kernels.norm(dim=1) * deviation
    return mean - resting, deviation


def carried(analysis: Analysis, site: Site, reader: Reader, position: tuple[int, int]) -> Tensor:
    """How much of a detector that fires at one position comes to a reader, for each channel: a depthwise kernel or a
    batch norm on the way may turn it round, and an activation then take it away."""
    assert site.activation is not None
    model, maps = analysis.target.model, torch.full((2, site.channels, *site.grid), site.activation.rest)
    row, column = position
    maps[1, :, row, column] = float(site.activation.function(torch.tensor(_FIRED)))
    maps = maps.to(analysis.target.device, analysis.target.dtype)
    with evaluation_mode(model), torch.no_grad():
        for step in reader.path:
            maps = step.function(maps) if isinstance(step, Activation) else model.get_submodule(step)(maps)
    heard: Tensor = (maps[1] - maps[0]).flatten(1).norm(dim=1).double().cpu()
    return heard


def _own(affine: Affine, reader: Reader, channels: int) -> Affine:
    """The site's channels among those of a norm that sees them concatenated with others."""
    span = _span(reader, channels)
    return Affine(affine.g[span], affine.h[span], affine.mean[span], affine.deviation[span])


def _span(reader: Reader, channels: int) -> slice:
    start = reader.offset // reader.repeat  # norms come before a flattening
    return slice(start, start + channels)


def _through_activation(activation: Activation, mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the activation of a Gaussian, by quadrature."""
    values = activation.function(mean[:, None] + deviation[:, None] * _POINTS)
    weights = _WEIGHTS / _WEIGHTS.sum()
    first = values @ weights
    second = (values - first[:, None]).square() @ weights
    return first, second.clamp(min=0).sqrt()


def _columns(layer: nn.Module, reader: Reader, channel: int) -> Tensor:
    """The weights that meet the channel, output channel first."""
    weight = exact(layer, "weight")
    if isinstance(layer, nn.ConvTranspose2d):
        weight = weight.transpose(0, 1)
    return weight[:, reader.inputs(channel)]


def _column_energy(analysis: Analysis, site: Site, reader: Reader) -> Tensor:
    """Squared size of each channel's columns, as the reader's own batch norm scales its outputs."""
    model = analysis.target.model
    layer = model.get_submodule(reader.module)
    weight = exact(layer, "weight")
    if isinstance(layer, nn.ConvTranspose2d):
        weight = weight.transpose(0, 1)
    norm = analysis.sites[reader.module].norm if reader.module in analysis.sites else None
    if norm is not None:
        weight = weight * affine_of(model.get_submodule(norm)).g.view(-1, *(1,) * (weight.dim() - 1))
    energy = weight.square().sum((0, *range(2, weight.dim())))
    span = energy[reader.offset : reader.offset + site.channels * reader.repeat]
    return span.view(site.channels, reader.repeat).sum(1)
