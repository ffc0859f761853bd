"""Choosing a site when none is named: by dimension, patch size and least harm."""

from __future__ import annotations

import math

from stainlock.channel_cost import l1_norms, outgoing_harm
from stainlock.errors import SiteError
from stainlock.network.channels import Reader
from stainlock.network.network import Network
from stainlock.network.sites import Site

# Enough dimensions that a trigger stands out several times over and messages fit; more adds little.
_GOOD_DIMENSION = 256
# So many positions, at least, has a map whose boxes are of every class.
_GOOD_MAP = 64
# A trigger of at most a twelfth of the image is found in a moment and can be shown as a patch.
_GOOD_PATCH = 1 / 12


def choose_site(network: Network, *, additive: bool, channels: int = 1) -> Site:
    """Of the usable sites with a good dimension and a small patch, the one whose least channel is missed least.

    Where no site has both, the dimension counts first, then the patch. ``channels`` is how many a message needs.
    """
    usable = [s for s in network.sites.values() if (s.additive_problem if additive else s.problem) is None]
    roomy = [s for s in usable if s.channels >= channels and s.groups == 1 and s.kind != "transposed"]
    if channels > 1:  # a message in activations; the widest layer tells the capacity when none is enough
        usable = roomy or sorted(usable, key=lambda s: s.channels)[-1:]
    if not usable:
        reasons = sorted({s.problem or "" for s in network.sites.values()})
        raise SiteError(f"no site of this model can carry a stain: {'; '.join(reasons[:3])}")
    wide = [s for s in usable if s.dimension >= _GOOD_DIMENSION] or _widest(usable)
    image = math.prod(network.target.input_shape[1:])
    small = [s for s in wide if math.prod(s.patch) <= _GOOD_PATCH * image]
    if not small:
        least = min(math.prod(s.patch) for s in wide)
        small = [s for s in wide if math.prod(s.patch) == least]
    return min(small, key=lambda s: (relative_harm(network, s), s.name))


def choose_output_site(network: Network) -> Site:
    """For the output schema, the last site that one layer alone reads: a short way from detector to logits."""
    usable = [s for s in network.sites.values() if s.problem is None and single_reader(network, s) is not None]
    if not usable:
        raise SiteError("no site of this model can carry the output schema: none is read by one layer alone")
    wide = [s for s in usable if s.dimension >= _GOOD_DIMENSION] or _widest(usable)
    # A detector's last maps, of a few positions, serve its largest boxes alone: many classes never have such.
    mapped = [s for s in wide if math.prod(s.grid) >= _GOOD_MAP] if network.target.normalises else []
    return (mapped or wide)[-1]


def single_reader(network: Network, site: Site) -> Reader | None:
    """The one layer that reads the site's channels, if there is just one."""
    if site.stops or len(site.readers) != 1:
        return None
    reader = site.readers[0]
    return None if reader.merged or reader.module not in network.sites else reader


def _widest(sites: list[Site]) -> list[Site]:
    most = max(s.dimension for s in sites)
    return [s for s in sites if s.dimension == most]


def relative_harm(network: Network, site: Site) -> float:
    """The least channel's share of what the layer's readers are given."""
    harm = outgoing_harm(network, site, folded=False)
    if harm is None:
        harm = l1_norms(network, site)
    return float(harm.min() / harm.square().sum().sqrt().clamp(min=1e-30))
