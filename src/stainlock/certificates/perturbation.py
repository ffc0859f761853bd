"""δ of the corollary on weight perturbations, measured between a stained model and a changed copy of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from stainlock.certificates.certificate import site_of_key
from stainlock.certificates.windows import windows_of
from stainlock.key import Key
from stainlock.network.network import layer_input
from stainlock.target import Target, evaluation_mode


def measured_perturbation(stained: Target, changed: Target, key: Key, batches: Iterable[Tensor]) -> float:
    """The largest |ŵ·φ̂(x) − w·φ(x)| over the key's detectors, the images of the batches, and every position.

    w is the detector and φ(x) the features in the stained model; ŵ is the same row of the changed model (fine-tuned,
    pruned, quantised), on the scale where the stained model's row is the unit vector w, and φ̂(x) its features. Pass it
    to `certify` as ``perturbation``. It is the largest over a sample; the corollary requires it for all inputs.
    """
    pairs = _responses(stained, changed, key, batches)
    return max((float((after - before).abs().max()) for before, after in pairs), default=0.0)


def exceedance_rate(stained: Target, changed: Target, key: Key, batches: Iterable[Tensor], threshold: float) -> float:
    """The fraction of positions that exceed a threshold in the changed model: what the corollary bounds."""
    above = total = 0
    for _, after in _responses(stained, changed, key, batches):
        above += int((after > threshold).sum())
        total += after.numel()
    return above / max(total, 1)


def _responses(
    stained: Target, changed: Target, key: Key, batches: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """w·φ(x) and ŵ·φ̂(x) of each batch and detector."""
    site, other = site_of_key(stained, key), site_of_key(changed, key)
    rows = site.rows(stained.model).double().cpu()
    theirs = other.rows(changed.model).double().cpu()
    for pixels in batches:
        with evaluation_mode(stained.model), evaluation_mode(changed.model), torch.no_grad():
            before, after = (
                windows_of(t, s, layer_input(t, s, pixels), len(pixels), overlapping=True)
                for t, s in ((stained, site), (changed, other))
            )
            for d in key.detectors:
                v = d.vector.double()
                taps = len(rows) // site.channels  # a transposed kernel has a row for every tap
                mine = range(d.channel * taps, (d.channel + 1) * taps)
                row = max(mine, key=lambda r: abs(float(rows[r] @ v)))
                scale = float(rows[row] @ v)
                # An additive stain's row contains more than its detector; only its change counts.
                moved = v + (theirs[row] - rows[row]) / scale
                group = site.group_of(d.channel)
                yield before.responses(v[None], group), after.responses(moved[None], group)
