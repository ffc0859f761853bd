"""Which site a stain takes when none is named.

Sites are compared by dimension (how far a trigger stands out), by patch (the part of the image that the trigger
covers), by what the search for the trigger costs, and last by the cost of the channel that is given up. The search runs
the network forward and back, up to the site, on the patch alone:

    search = 3 · steps · (MACs of the layers before the site / MACs of all) · (patch / image),      in forward passes.
"""

from __future__ import annotations

import math

from stainlock.channel_cost import l1_norms, measure_moments, outgoing_cost
from stainlock.errors import SiteError
from stainlock.network.network import Network
from stainlock.network.sites import Site
from stainlock.stains import schemas
from stainlock.trigger import STEPS

# Enough dimensions for a trigger to stand out several times over and for messages to fit; more adds little. Half as
# many do where that saves a long search.
GOOD_DIMENSION, _FAIR_DIMENSION = 256, 128
# The least number of positions of an object detector's map whose boxes are of every class.
_GOOD_MAP = 64
# A trigger of at most a twelfth of the image is found quickly and can be shown as a patch.
_GOOD_PATCH = 1 / 12
# The longest search, in forward passes of the whole network.
_AFFORDABLE = 8.0


def choose_site(network: Network, *, additive: bool, channels: int = 1, dimension: int = 1) -> Site:
    """The site with the lowest relative channel cost, of those with a good dimension, a small patch and a short search.

    Where no site has all three, the search counts first, then the dimension, then the patch. ``channels`` and
    ``dimension`` are what a message needs.
    """
    usable = [s for s in network.sites.values() if (s.additive_problem if additive else s.problem) is None]
    roomy = [s for s in usable if s.channels >= channels and s.groups == 1 and s.kind != "transposed"]
    if channels > 1:  # a message in activations; where none is wide enough, the error tells the widest layer's capacity
        usable = roomy or sorted(usable, key=lambda s: s.channels)[-1:]
    if not usable:
        reasons = sorted({(s.additive_problem if additive else s.problem) or "" for s in network.sites.values()})
        raise SiteError(f"no site of this model can carry a stain: {'; '.join(reasons[:3])}")
    wide = [s for s in usable if s.dimension >= max(dimension, GOOD_DIMENSION)] or _widest(usable)
    searches = search_costs(network)
    quick = [s for s in wide if searches[s.name] <= _AFFORDABLE]
    if not quick:
        fair = [s for s in usable if s.dimension >= max(dimension, _FAIR_DIMENSION)]
        quick = [s for s in fair if searches[s.name] <= _AFFORDABLE]
    wide = quick or wide
    image = math.prod(network.target.input_shape[1:])
    small = [s for s in wide if math.prod(s.patch) <= _GOOD_PATCH * image]
    if not small:
        least = min(math.prod(s.patch) for s in wide)
        small = [s for s in wide if math.prod(s.patch) == least]
    measure_moments(network, small)
    return min(small, key=lambda s: (relative_cost(network, s), s.name))


def choose_output_site(network: Network) -> Site:
    """For the output schema, the last site with a single reader: a short way from detector to logits."""
    usable = [s for s in network.sites.values() if s.problem is None and schemas.single_reader(network, s) is not None]
    if not usable:
        raise SiteError("no site of this model can carry the output schema: none is read by one layer alone")
    wide = [s for s in usable if s.dimension >= GOOD_DIMENSION] or _widest(usable)
    # The last maps of an object detector have few positions and serve the largest boxes, which many classes lack.
    mapped = [s for s in wide if math.prod(s.grid) >= _GOOD_MAP] if network.target.normalises else []
    return (mapped or wide)[-1]


def search_costs(network: Network, steps: int = STEPS) -> dict[str, float]:
    """What the search for a trigger costs at each site, in forward passes."""
    image = max(1, math.prod(network.target.input_shape[1:]))
    done, before = 0.0, {}
    for site in network.sites.values():  # in the order in which the network calls them
        before[site.name] = done
        done += site.dimension * site.channels * max(1, math.prod(site.grid))
    return {
        site.name: 3 * steps * before[site.name] / max(done, 1.0) * math.prod(site.patch) / image
        for site in network.sites.values()
    }


def _widest(sites: list[Site]) -> list[Site]:
    most = max(s.dimension for s in sites)
    return [s for s in sites if s.dimension == most]


def relative_cost(network: Network, site: Site) -> float:
    """The cost of the cheapest channel, relative to that of all."""
    cost = outgoing_cost(network, site, folded=False)
    if cost is None:
        cost = l1_norms(network, site)
    return float(cost.min() / cost.square().sum().sqrt().clamp(min=1e-30))
