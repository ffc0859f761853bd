"""The site and the channel that a stain takes if none is named, and what a channel costs.

Sites are compared by dimension (which decides how far a trigger stands out), by patch (the part of the image that the
trigger covers), by the cost of the trigger search, and last by channel cost.

A step of the search runs the network forward and backward, up to the site, on the patch alone. Its cost in forward
passes of the whole network is estimated from the work of each layer:

    ops    = multiplications + 30 · outputs          (outputs are normalised and activated, which costs as much as 30)
    call   = 2 · 10⁶                                  (the time it takes to call a layer at all, in multiplications)

    step   = 3 · Σ over layers before the site (ops · patch / image + call) / Σ over all layers (ops + call)

where patch / image is at most a quarter where a window can be searched (`stainlock.trigger.window_for`). If all steps
together are too expensive, fewer are made, but at least half.

Channel cost is how much the network loses when a channel is removed, estimated without data. After batch norm a
channel's pre-activation has mean β and standard deviation γ, from which the mean and deviation that its readers see can
be computed. Elsewhere statistics come from a few synthetic inputs. The lost mean can be folded into the readers' biases
or into the batch norms after them, so the cost is mainly the lost variance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stainlock.errors import SiteError
from stainlock.network.graph import Passed, Reader
from stainlock.network.network import Network, Reached, Site
from stainlock.network.norms import affine_of, expecting_less, is_batch_norm
from stainlock.network.ops import Activation, through_activation
from stainlock.numerics import exact, has, input_axis
from stainlock.plan import Write, write, write_values
from stainlock.stains import schemas
from stainlock.target import evaluation_mode, probe_inputs
from stainlock.trigger import STEPS, window_size

# --- sites ------------------------------------------------------------------------------------------------------------

# Enough dimensions for a trigger to respond several times as strongly as natural images, and for messages to fit; more
# adds little. Half as many are enough if that avoids a long search, and three eighths if nothing else does. With a
# quarter, natural images come too close to triggers.
GOOD_DIMENSION, _FAIR_DIMENSION, _LEAST_DIMENSION = 256, 128, 96
# Minimum positions of an object detector's map: boxes of smaller maps don't have every class.
_GOOD_MAP = 64
# A trigger that covers at most a twelfth of the image is found quickly and can be shown as a patch.
_GOOD_PATCH = 1 / 12
# Limits on the cost of a step, in forward passes of the whole network, and dimensions, tried in this order.
_QUICK = (
    (0.22, GOOD_DIMENSION), (0.22, _FAIR_DIMENSION), (0.5, GOOD_DIMENSION), (0.5, _FAIR_DIMENSION),
    (0.5, _LEAST_DIMENSION), (0.8, GOOD_DIMENSION), (0.8, _FAIR_DIMENSION), (0.8, _LEAST_DIMENSION),
)  # fmt: skip
# Limit on the cost of all steps together, in forward passes. At least half of the steps are always made: with fewer,
# triggers stand out too little.
_BUDGET = 3.0
_FORWARD_AND_BACK, _OPS_AN_OUTPUT, _OPS_A_CALL = 3, 30, 2e6


def choose_site(
    network: Network, *, additive: bool, channels: int = 1, dimension: int = 1, without: Collection[str] = ()
) -> Site:
    """The site of lowest relative channel cost among those with a good dimension, a small patch and a short search.

    If no site has all three, a short search comes first, then the dimension, then the patch. ``channels`` and
    ``dimension`` are the minimum that a message needs, ``without`` the sites that were tried.
    """
    left = [s for s in network.sites.values() if s.name not in without]
    usable = [s for s in left if (s.additive_problem if additive else s.problem) is None]
    roomy = [s for s in usable if s.channels >= channels and s.groups == 1 and s.kind != "transposed"]
    if channels > 1:  # a message in activations; if no layer is wide enough, the error names the widest one's capacity
        usable = roomy or sorted(usable, key=lambda s: s.channels)[-1:]
    if not usable:
        reasons = sorted({(s.additive_problem if additive else s.problem) or "" for s in network.sites.values()})
        raise SiteError(f"no site of this model can carry a stain: {'; '.join(reasons[:3])}")
    wide = _quick(network, usable, dimension)
    image = math.prod(network.target.input_shape[1:])
    small = [s for s in wide if math.prod(s.searched) <= _GOOD_PATCH * image]
    if not small:
        least = min(math.prod(s.searched) for s in wide)
        small = [s for s in wide if math.prod(s.searched) == least]
    measure_moments(network, small)
    return min(small, key=lambda s: (relative_cost(network, s), s.name))


def choose_output_site(network: Network) -> Site:
    """For the output schema, the last site with a single reader: a short path from detector to logits."""
    usable = [s for s in network.sites.values() if s.problem is None and schemas.single_reader(network, s) is not None]
    if not usable:
        raise SiteError("no site of this model can carry the output schema: none is read by a single layer")
    wide = [s for s in usable if s.dimension >= GOOD_DIMENSION] or _widest(usable)
    # The last maps of an object detector have few positions and serve only the largest boxes, which many classes lack.
    mapped = [s for s in wide if math.prod(s.grid) >= _GOOD_MAP] if network.target.normalises else []
    return (mapped or wide)[-1]


def _quick(network: Network, usable: list[Site], dimension: int) -> list[Site]:
    """Sites of good dimension with cheap steps or, failing that, affordable ones; if steps are expensive everywhere,
    the site where they are cheapest."""
    costs = step_costs(network)
    # A layer with one position has one response per synthetic input: too few to estimate natural responses.
    usable = [s for s in usable if math.prod(s.grid) > 1] or usable
    for most, enough in _QUICK:
        wide = [s for s in usable if s.dimension >= max(dimension, enough)]
        if quick := [s for s in wide if costs[s.name] <= most]:
            return quick
    wide = [s for s in usable if s.dimension >= max(dimension, _FAIR_DIMENSION)] or _widest(usable)
    return [min(wide, key=lambda s: (costs[s.name], s.name))]


def step_costs(network: Network) -> dict[str, float]:
    """The cost of one step of the trigger search at each site, in forward passes."""
    image = max(1, math.prod(network.target.input_shape[1:]))
    done, calls, before = 0.0, 0, {}
    for site in network.sites.values():  # in the order in which the network calls them
        before[site.name] = done, calls
        done += (site.dimension + _OPS_AN_OUTPUT) * site.channels * max(1, math.prod(site.grid))
        calls += 1
    whole = max(1.0, done + calls * _OPS_A_CALL)
    sizes = {site.name: window_size(network.target, site) or site.searched for site in network.sites.values()}
    shares = {name: math.prod(size) / image for name, size in sizes.items()}
    return {
        name: _FORWARD_AND_BACK * (ops * shares[name] + number * _OPS_A_CALL) / whole
        for name, (ops, number) in before.items()
    }


def affordable_steps(network: Network, site: Site) -> int:
    """As many steps as the budget allows, but at least half of `STEPS`."""
    cost = step_costs(network)[site.name]
    return STEPS if cost * STEPS <= _BUDGET else max(STEPS // 2, int(_BUDGET / cost))


def _widest(sites: list[Site]) -> list[Site]:
    most = max(s.dimension for s in sites)
    return [s for s in sites if s.dimension == most]


def relative_cost(network: Network, site: Site) -> float:
    """The cost of the cheapest channel, relative to the root of the sum of squares over all channels."""
    cost = outgoing_cost(network, site, folded=False)
    if cost is None:
        cost = l1_norms(network, site)
    return float(cost.min() / cost.square().sum().sqrt().clamp(min=1e-30))


# --- channels ---------------------------------------------------------------------------------------------------------

Choice = Literal["l1", "outgoing"]
_LIVE = 0.5  # fraction of the layer's median norm or scale from which a channel counts as live
_NEVER = 6.0  # standard deviations: a channel whose mean is this far below its threshold never fires on natural inputs


def l1_norms(network: Network, site: Site) -> Tensor:
    """The paper's choice: the ℓ1 norm of each channel's weights."""
    return _outputs_first(site.layer(network.target.model)).flatten(1).abs().sum(1)


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


def _columns(layer: nn.Module, reader: Reader, channel: int) -> Tensor:
    """The reader's weights for a channel, output channel first."""
    return _outputs_first(layer)[:, reader.inputs(channel)]


def _outputs_first(layer: nn.Module) -> Tensor:
    return exact(layer, "weight").transpose(0, 1 - input_axis(layer))


def _column_energy(network: Network, site: Site, reader: Reader) -> Tensor:
    """Squared norm of the reader's weights for each channel, scaled by the reader's own batch norm if it has one."""
    model = network.target.model
    layer = model.get_submodule(reader.module)
    weight = _outputs_first(layer)
    norm = network.sites[reader.module].norm if reader.module in network.sites else None
    if norm is not None:
        weight = weight * affine_of(model.get_submodule(norm)).g.view(-1, *(1,) * (weight.dim() - 1))
    energy = weight.square().sum((0, *range(2, weight.dim())))
    span = energy[reader.offset : reader.offset + site.channels * reader.repeat]
    return span.view(site.channels, reader.repeat).sum(1)
