"""The choice of layers for a figure when none are named."""

from __future__ import annotations

import math

from stainlock.errors import SiteError
from stainlock.locks.parts.draft import Demand, lock_sites
from stainlock.network.network import analyse
from stainlock.target import Target

_GOOD_DIMENSION = 64  # layers of lower dimension are chosen only if there are no others


def spread_layers(target: Target, purpose: str, count: int) -> tuple[str, ...]:
    """``count`` layers that can carry a stain, or a kind of lock, evenly spaced from the first to the last.

    ``purpose`` is ``"stain"`` or the kind of lock.
    """
    network = analyse(target)
    usable = [s for s in network.sites.values() if s.problem is None]
    usable = usable or [s for s in network.sites.values() if s.additive_problem is None]
    if purpose != "stain":
        logits = purpose == "internal"
        half = [n / 2 for n in target.input_shape[1:]]
        able = lock_sites(network, Demand(logits, gates=0 if logits else 1))
        usable = [s for s in able if all(p <= most for p, most in zip(s.patch, half, strict=True))]
    # Layers with one position and grouped convolutions are not typical of a network, so they are a last resort.
    plain = [s for s in usable if s.groups == 1 and (math.prod(s.grid) > 1 or s.kind != "convolution")] or usable
    wide = [s.name for s in plain if s.dimension >= _GOOD_DIMENSION] or [s.name for s in plain]
    if not wide:
        raise SiteError(f"no layer of this model can carry a {purpose}: `stainlock inspect` says why")
    count = min(count, len(wide))
    if count == 1:
        return (wide[len(wide) // 2],)
    return tuple(wide[i * (len(wide) - 1) // (count - 1)] for i in range(count))
