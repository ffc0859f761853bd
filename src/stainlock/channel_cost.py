"""Channel cost: how much the network loses when a channel is removed, estimated without data.

After batch norm a channel's pre-activation has mean β and standard deviation γ, from which the mean and deviation that
its readers see can be computed. Elsewhere statistics come from a few synthetic inputs. The lost mean can be folded into
the readers' biases or into the batch norms after them, so the cost is mainly the lost variance.

A stain removes channels of one site (`outgoing_cost`, `rank_channels`, `fold_loss`). A lock removes channels all along
its signal's path (`column_shares`, `fold_moments`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from stainlock.network.activations import Activation
from stainlock.network.channels import Passed, Reader
from stainlock.network.features import Reached
from stainlock.network.moments import remembered
from stainlock.network.network import Network
from stainlock.network.norms import affine_of, expecting_less, is_batch_norm
from stainlock.network.ops import Moments, never_negative, through_activation
from stainlock.network.signals import Reading
from stainlock.network.sites import Site
from stainlock.plan import Write, write, write_values
from stainlock.probes import probe_inputs
from stainlock.target import evaluation_mode
from stainlock.tensors import at, exact, has

Choice = Literal["l1", "outgoing"]
_LIVE = 0.5  # fraction of the layer's median norm or scale from which a channel counts as live
_NEVER = 6.0  # standard deviations: a channel whose mean is this far below its threshold never fires on natural inputs
_FIRED = 10.0  # pre-activation of a firing detector in `carried`, where its exact value does not matter
# Exponent for estimated variances in a residual stream. Of the values tried on ResNet50, this one gives the ranking
# most like that on natural images.
_STREAM = 0.25
# At most this fraction of a reader's output variance is subtracted from its batch norm.
_MOST_LOST = 0.5


def l1_norms(network: Network, site: Site) -> Tensor:
    """The paper's choice: the ℓ1 norm of each channel's weights."""
    weight = exact(site.layer(network.target.model), "weight")
    if site.kind == "transposed":
        weight = weight.transpose(0, 1)
    return weight.flatten(1).abs().sum(1)


def outgoing_cost(
    network: Network, site: Site, *, folded: bool, moments: tuple[Tensor, Tensor] | None = None
) -> Tensor | None:
    """Root mean square of what readers lose when a channel falls silent; None if no reader is known.

    With ``folded`` only the deviation counts, since the lost mean goes into the readers' biases. ``moments`` is the
    result of `site_moments`, if it was computed before.
    """
    if not site.readers or site.activation is None:
        return None
    total = torch.zeros(site.channels, dtype=torch.float64)
    moments = site_moments(network, site) if moments is None else moments
    for reader in site.readers:
        mean, deviation = _loss(network, site, reader, moments)
        lost = deviation**2 + (0 if folded else mean**2)
        total += lost * _column_energy(network, site, reader)
    return total.sqrt()


def rank_channels(network: Network, site: Site, choice: Choice, *, folded: bool, live: bool) -> list[int]:
    """Channels in the order of their cost, or of their ℓ1 norms if no reader is known.

    Channels that never fire although their weights have the usual size are probably detectors. They come last, so a
    second stain or a lock leaves the first stain alone. ``live`` leaves out channels far smaller than the others, in
    which an added detector would be conspicuous.
    """
    if choice not in ("l1", "outgoing"):
        raise ValueError(f"expected choice 'l1' or 'outgoing', got {choice!r}")
    moments = site_moments(network, site)
    cost = outgoing_cost(network, site, folded=folded, moments=moments) if choice == "outgoing" else None
    norms = l1_norms(network, site)
    if cost is None:
        cost = norms
    alive = norms >= _LIVE * norms.median()
    if site.norm is not None:
        scales = affine_of(network.target.model.get_submodule(site.norm)).g.abs()
        alive &= (scales >= _LIVE * scales.median()) & (scales <= scales.median() / _LIVE)
    taken = _waiting(network, site, moments)
    # Dead channels have equal costs: sort these by norm, then by index.
    order = sorted(range(site.channels), key=lambda k: (bool(taken[k]), float(cost[k]), float(norms[k]), k))
    return [k for k in order if alive[k]] if live else order


def _waiting(network: Network, site: Site, moments: tuple[Tensor, Tensor]) -> Tensor:
    """Channels that are silent only because of their threshold. Dead channels, with weights near zero, don't count."""
    mean, deviation = moments
    rows = site.rows(network.target.model).detach().double().cpu()
    slopes = rows.reshape(site.channels, -1).norm(dim=1)
    if site.norm is not None:
        slopes = slopes * affine_of(network.target.model.get_submodule(site.norm)).g.abs()
    below = 0.0 if site.activation is None else site.activation.silent_below
    waiting: Tensor = (below - mean > _NEVER * deviation) & (slopes >= _LIVE / 2 * slopes.median())
    return waiting


def fold_loss(network: Network, site: Site, resting: dict[int, float]) -> list[Write]:
    """Writes that fold channels' mean contributions into their readers' biases.

    ``resting`` is the level at which each removed channel will rest; readers lose its mean minus that level. If no
    batch norm has statistics of the channel, biases stay as they are: folding means measured on synthetic inputs did
    more harm than good.
    """
    model = network.target.model
    writes = []
    moments = site_moments(network, site)
    for reader in site.readers:
        passed = [model.get_submodule(step.module) for step in reader.path if isinstance(step, Passed)]
        if site.norm is None and not any(is_batch_norm(module) for module in passed):
            continue
        layer = model.get_submodule(reader.module)
        missing: Tensor | float = 0.0
        for channel, rest in resting.items():
            lost, _ = _loss(network, site, reader, moments, rest)
            columns = _columns(layer, reader, channel)
            missing = missing + columns.sum(tuple(range(1, columns.dim()))) * lost[channel]
        norm = network.sites[reader.module].norm if reader.module in network.sites else None
        if has(layer, "bias"):
            writes.append(write(model, f"{reader.module}.bias", (None,), exact(layer, "bias") + missing, "fold"))
        elif norm is not None:
            values = expecting_less(model.get_submodule(norm), torch.as_tensor(missing))
            writes += write_values(model, norm, (None,), values, "fold")
    return writes


def site_moments(network: Network, site: Site) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the site's pre-activations: from its batch norm, else from synthetic inputs."""
    if site.norm is not None:
        affine = affine_of(network.target.model.get_submodule(site.norm))
        return affine.mean, affine.deviation
    if site.name not in network.measured:
        measure_moments(network, [site])
    return network.measured[site.name]


def measure_moments(network: Network, sites: Iterable[Site]) -> None:
    """Measure the moments of those sites that have no batch norm, all in one pass over synthetic inputs."""
    unknown = {s.name: s for s in sites if s.norm is None and s.name not in network.measured}
    left = set(unknown)

    def record(site: Site) -> Any:
        def hook(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            flat = output.double().cpu().movedim(-1 if site.kind == "linear" else 1, 0).flatten(1)
            network.measured[site.name] = flat.mean(1), flat.std(1)
            left.discard(site.name)
            if not left:
                raise Reached

        return hook

    if not unknown:
        return
    target = network.target
    with ExitStack() as hooks, evaluation_mode(target.model), torch.no_grad():
        for site in unknown.values():
            hooks.enter_context(site.layer(target.model).register_forward_hook(record(site)))
        with suppress(Reached):
            target.run_traced(probe_inputs(target, "channel cost"))


def _loss(
    network: Network, site: Site, reader: Reader, moments: tuple[Tensor, Tensor], rest: float | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel as the reader sees it, minus the constant it sees if the channel is silent."""
    assert site.activation is not None
    model = network.target.model
    (mean, deviation), resting = (
        moments,
        torch.full_like(moments[0], site.activation.rest if rest is None else rest),
    )
    mean, deviation = through_activation(site.activation, mean, deviation)
    for step in reader.path:
        if isinstance(step, Activation):
            mean, deviation = through_activation(step, mean, deviation)
            resting = step.function(resting)
        elif is_batch_norm(module := model.get_submodule(step.module)):
            own = affine_of(module).span(step.offset, len(mean))
            resting = own.g * resting + own.h
            mean, deviation = own.mean, own.deviation
        else:  # a depthwise kernel: its sum scales the mean, its norm the deviation
            kernels = exact(module, "weight").flatten(1)
            own_kernels = kernels[step.offset : step.offset + len(mean)]
            resting, mean = own_kernels.sum(1) * resting, own_kernels.sum(1) * mean
            deviation = own_kernels.norm(dim=1) * deviation
    return mean - resting, deviation


def carried(network: Network, site: Site, reader: Reader, position: tuple[int, ...]) -> Tensor:
    """How much of a detector's signal at one position would reach a reader, for each channel. A depthwise kernel or a
    batch norm on the path may flip its sign, and an activation may then remove it."""
    assert site.activation is not None
    model, maps = network.target.model, torch.full((2, site.channels, *site.grid), site.activation.rest)
    at(maps[1], position).fill_(float(site.activation.function(torch.tensor(_FIRED))))
    maps = maps.to(network.target.device, network.target.dtype)
    with evaluation_mode(model), torch.no_grad():
        for step in reader.path:
            maps = step.function(maps) if isinstance(step, Activation) else model.get_submodule(step.module)(maps)
    heard: Tensor = (maps[1] - maps[0]).flatten(1).norm(dim=1).double().cpu()
    return heard


def _columns(layer: nn.Module, reader: Reader, channel: int) -> Tensor:
    """The reader's weights for a channel, output channel first."""
    weight = exact(layer, "weight")
    if isinstance(layer, nn.ConvTranspose2d):
        weight = weight.transpose(0, 1)
    return weight[:, reader.inputs(channel)]


def _column_energy(network: Network, site: Site, reader: Reader) -> Tensor:
    """Squared norm of the reader's weights for each channel, scaled by the reader's own batch norm if it has one."""
    model = network.target.model
    layer = model.get_submodule(reader.module)
    weight = exact(layer, "weight")
    if isinstance(layer, nn.ConvTranspose2d):
        weight = weight.transpose(0, 1)
    norm = network.sites[reader.module].norm if reader.module in network.sites else None
    if norm is not None:
        weight = weight * affine_of(model.get_submodule(norm)).g.view(-1, *(1,) * (weight.dim() - 1))
    energy = weight.square().sum((0, *range(2, weight.dim())))
    span = energy[reader.offset : reader.offset + site.channels * reader.repeat]
    return span.view(site.channels, reader.repeat).sum(1)


def dense_layers(network: Network) -> list[fx.Node]:
    return [
        n for n in network.part.graph.nodes
        if isinstance(layer := network.leaf(n), nn.Conv2d | nn.Linear) and getattr(layer, "groups", 1) == 1
    ]  # fmt: skip


def column_shares(network: Network) -> dict[fx.Node, Tensor]:
    """For every dense layer, each input channel's share of the energy of its outputs: the cost of removing it."""
    known, dense = remembered(network), dense_layers(network)
    unknown = [n for n in dense if n.all_input_nodes[0] not in known]
    measured = _measured_energy(network, unknown) if unknown else {}
    shares = {}
    for node in dense:
        weight = exact(network.part.leaf(node), "weight")
        if (norm := network.norm_behind(node)) is not None:
            g = affine_of(network.part.leaf(norm)).g
            weight = weight * g.view(-1, *(1,) * (weight.dim() - 1))
        columns = weight.square().sum((0, *range(2, weight.dim())))
        if node in measured:
            energy = measured[node]
        else:
            energy = _lost_energy(network, node.all_input_nodes[0], known)
        shares[node] = energy * columns / (energy * columns).sum().clamp(min=1e-30)
    return shares


def _lost_energy(network: Network, node: fx.Node, known: dict[fx.Node, Moments]) -> Tensor:
    """What a layer loses with each channel of a map: its variance, since the mean can be folded into a bias.

    In a residual stream, whose blocks are far from independent, the estimate is poor, so differences are damped.
    """
    variance = known[node][1].square().clamp(min=1e-30)
    while not is_batch_norm(network.leaf(node)):
        sources = [n for n in node.all_input_nodes if n in known]
        if len(sources) != 1:
            return variance**_STREAM
        (node,) = sources
    return variance


def _measured_energy(network: Network, layers: list[fx.Node]) -> dict[fx.Node, Tensor]:
    """Mean square of each input channel of these layers, on synthetic inputs."""
    target, energy = network.target, {}

    def record(node: fx.Node) -> Any:
        def hook(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            channels = -1 if isinstance(layer, nn.Linear) else 1
            energy[node] = given[0].double().square().movedim(channels, 0).flatten(1).mean(1).cpu()

        return hook

    with ExitStack() as hooks, evaluation_mode(target.model), torch.no_grad():
        for node in layers:
            hooks.enter_context(network.part.leaf(node).register_forward_pre_hook(record(node)))
        target.run_traced(probe_inputs(target, "channel cost"))
    return energy


def fold_moments(
    network: Network, readings: Iterable[Reading], rewritten: Iterable[tuple[fx.Node, int]], part: str
) -> list[Write]:
    """Writes that subtract removed channels' means and variances from the batch norms after their readers.

    Later layers then see the same mean and variance. For readers without a batch norm the mean goes into their bias.
    After a ReLU only the mean is subtracted, since variance estimates are poor there; in the signed streams of linear
    bottlenecks they are good. Only statistics from batch norms are folded: those of synthetic inputs did more harm than
    good. Rows that are ``rewritten`` need no correction.
    """
    known, model = remembered(network), network.target.model
    lost: dict[fx.Node, Moments] = {}
    for reader, cell in sorted(
        {(r.reader, r.cell) for r in readings}, key=lambda pair: (pair[0].name, pair[1].channel)
    ):
        if cell.node in known:
            mean, deviation = (moment[cell.columns] for moment in known[cell.node])
            gains, energies = _taps(exact(network.part.leaf(reader), "weight")[:, cell.columns])
            if _behind_relu(network, cell.node):
                energies = torch.zeros_like(energies)
            before = lost.get(reader, (torch.zeros(len(gains), dtype=torch.float64),) * 2)
            lost[reader] = before[0] + gains @ mean, before[1] + energies @ deviation.square()
    for reader, row in rewritten:
        for missing in lost.get(reader, ()):
            missing[row] = 0.0
    writes = []
    for reader, (mean, variance) in lost.items():
        if (behind := network.norm_behind(reader)) is not None:
            values = expecting_less(network.part.leaf(behind), mean, variance, most=_MOST_LOST)
            writes += write_values(model, network.name(behind), (None,), values, part)
        elif has(network.part.leaf(reader), "bias") and not network.ends_at(reader):
            bias = exact(network.part.leaf(reader), "bias") + mean
            writes.append(write(model, f"{network.name(reader)}.bias", (None,), bias, part))
    return writes


def _behind_relu(network: Network, node: fx.Node) -> bool:
    """True if a map has no negative values, for a squeeze-and-excite block before its gates are applied."""
    gated = next((block.squeezed for block in network.blocks.values() if node in (block.product, block.output)), node)
    return never_negative(network.part, gated)


def _taps(columns: Tensor) -> tuple[Tensor, Tensor]:
    """The factors by which each output sees a channel's mean and variance; neighbouring positions are taken to have
    correlation ½."""
    if columns.dim() == 2:
        return columns, columns.square()
    taps = columns.flatten(2)
    whole = taps.sum(2)
    return whole, (whole.square() + taps.square().sum(2)) / 2
