"""inspect(): where a model can carry a stain, and which locks can start there."""

from __future__ import annotations

from dataclasses import dataclass

from stainlock.errors import SiteError
from stainlock.locks.parts.draft import Demand, lock_sites
from stainlock.network.network import Network, Site, analyse
from stainlock.stains.choice import choose_site
from stainlock.target import Target


@dataclass(frozen=True)
class Inspection:
    """What `inspect` finds: ``sites``, the usable ones first; the name of the one that `stain` would choose, or None;
    and for each site the kinds of lock whose signal finds a path from there.

    >>> found = sl.inspect(target)
    >>> found.recommended in found.network.sites
    True
    """

    network: Network
    sites: tuple[Site, ...]
    recommended: str | None
    locks: dict[str, tuple[str, ...]]


def inspect(target: Target) -> Inspection:
    """The layers of a model that can carry a stain, as `stainlock inspect` lists them.

    >>> import stainlock as sl
    >>> target = sl.Target.from_reference("torchvision:resnet18", weights="random")
    >>> found = sl.inspect(target)
    >>> len(found.sites), found.recommended in {site.name for site in found.sites}
    (21, True)
    """
    network = analyse(target)
    sites = sorted(network.sites.values(), key=lambda s: (s.problem is not None, s.additive_problem is not None))
    return Inspection(network, tuple(sites), _recommended(network), _locks(network))


def _recommended(network: Network) -> str | None:
    try:
        return choose_site(network, additive=False).name
    except SiteError:
        return None


def _locks(network: Network) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = dict.fromkeys(network.sites, ())
    if not network.is_whole:
        return found
    for kind, demand in (("internal", Demand(to_logits=True)), ("squeeze-excite", Demand(to_logits=False, gates=1))):
        for site in lock_sites(network, demand):
            found[site.name] += (kind,)
    return found
