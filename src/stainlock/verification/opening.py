"""Weights of a suspect that still has a keyed lock, in the order in which they were before it.

The lock's key puts columns back in order by the names of their tensors. Where an exporter or a thief has given them
other names, each tensor of a fitting shape is put in the order of the stained layer as if it were that one, and the
detector is looked for among all. The orders know nothing of v, so that the p-value holds once it pays for the
additional rows, as it does for any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from torch import Tensor

from stainlock.key import Key
from stainlock.target import Target

_MOST = 256  # tensors that are tried


def opened_suspect(
    suspect: Target | Mapping[str, Tensor], lock_key: Key, sites: Sequence[str]
) -> Target | dict[str, Tensor]:
    """A suspect without this lock, where a stain at one of these ``sites`` may be."""
    if isinstance(suspect, Target):
        return lock_key.opened(suspect)
    return lock_key.opened_weights(suspect) | _opened_without_names(lock_key, suspect, sites)


def _opened_without_names(lock_key: Key, weights: Mapping[str, Tensor], sites: Sequence[str]) -> dict[str, Tensor]:
    """Tensors in the orders that undo the lock at these ``sites``; in any of its orders where it has no such layer."""
    lost = [p for p in lock_key.revert.permutations if p.parameter not in weights]
    wanted = [p for p in lost if p.parameter in {f"{site}.weight" for site in sites}] or lost
    tried = (
        (f"{name} as {p.parameter}", p.of(tensor))
        for p in wanted
        for name, tensor in weights.items()
        if tensor.is_floating_point() and tensor.dim() > 1 and p.fits(tensor.shape)
    )
    return dict(islice(tried, _MOST))
