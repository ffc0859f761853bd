"""The site that a stain takes if none is named.

Sites are compared by dimension (which decides how far a trigger stands out), by patch (the part of the image that the
trigger covers), by the cost of the trigger search, and last by channel cost. A step of the search runs the network
forward and backward, up to the site, on the patch alone. Its cost in forward passes of the whole network is estimated
from the work of each layer:

    ops    = multiplications + 30 · outputs          (outputs are normalised and activated, which costs as much as 30)
    call   = 2 · 10⁶                                  (the time it takes to call a layer at all, in multiplications)

    step   = 3 · Σ over layers before the site (ops · patch / image + call) / Σ over all layers (ops + call)

If all steps together are too expensive, fewer are made, but at least half.
"""

from __future__ import annotations

import math

from stainlock.channel_cost import l1_norms, measure_moments, outgoing_cost
from stainlock.errors import SiteError
from stainlock.network.network import Network
from stainlock.network.sites import Site
from stainlock.stains import schemas
from stainlock.trigger import STEPS

# Enough dimensions for a trigger to respond several times as strongly as natural images, and for messages to fit; more
# adds little. Half as many are enough if that avoids a long search. With a quarter, natural images come too close to
# triggers.
GOOD_DIMENSION, _FAIR_DIMENSION = 256, 128
# Minimum positions of an object detector's map: boxes of smaller maps don't have every class.
_GOOD_MAP = 64
# A trigger that covers at most a twelfth of the image is found quickly and can be shown as a patch.
_GOOD_PATCH = 1 / 12
# Limits on the cost of a step, tried in this order, in forward passes of the whole network.
_COSTS_OF_A_STEP = (0.22, 0.5, 0.8)
# Limit on the cost of all steps together, in forward passes. At least half of the steps are always made: with fewer,
# triggers stand out too little.
_BUDGET = 3.0
_FORWARD_AND_BACK, _OPS_AN_OUTPUT, _OPS_A_CALL = 3, 30, 2e6


def choose_site(network: Network, *, additive: bool, channels: int = 1, dimension: int = 1) -> Site:
    """The site of lowest relative channel cost among those with a good dimension, a small patch and a short search.

    If no site has all three, a short search comes first, then the dimension, then the patch. ``channels`` and
    ``dimension`` are the minimum that a message needs.
    """
    usable = [s for s in network.sites.values() if (s.additive_problem if additive else s.problem) is None]
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
    for most in _COSTS_OF_A_STEP:
        for enough in (GOOD_DIMENSION, _FAIR_DIMENSION):
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
    shares = {site.name: math.prod(site.searched) / image for site in network.sites.values()}
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
