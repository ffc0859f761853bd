"""Files made of copies of several versions of a model: remove the other versions' share before reading marks.

The average of copies of two versions differs from either base by half the difference between the versions. To the marks
this is noise, usually many times as large as they are. But the owner has both bases, so for a tensor S of the suspect

    S  =  s_0 · base + Σ_v s_v · V_v + rest,        base + rest  is read in place of S,

with the shares s fitted by least squares to a sample of the weights, except those that are zero (pruned). A version
enters the sum only if that lowers the median of |rest| by more than a tenth. Most suspects contain no other version and
are read as they are. Nothing here uses any client's code, so tracing stays valid whatever is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SAMPLE = 65536  # weights per tensor to which shares are fitted, about
_FEWEST = 64  # usable weights needed in the sample
_FALLS = 0.9  # a version is accepted if the median of |rest| falls below this share of its previous value

State = Mapping[str, Tensor]


def without_versions(
    suspect: State, base: State, versions: Mapping[str, State]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The suspect's tensors, under the base's names, minus the share of other versions; and which versions had one."""
    left, found = dict(suspect), set()
    for name, theirs in suspect.items():
        others = {label: state[name] for label, state in versions.items()
                  if name in state and state[name].shape == theirs.shape}  # fmt: skip
        if not others or base[name].shape != theirs.shape:
            continue
        ours = _plain(base[name])
        shares = _shares(_plain(theirs), ours, {label: _plain(other) for label, other in others.items()})
        if len(shares) > 1:
            rest = _plain(theirs)
            for label, share in shares.items():
                rest = rest - share * (_plain(others[label]) if label else ours)
            left[name] = (ours + rest).view(theirs.shape)
            found |= set(shares) - {""}
    return left, tuple(label for label in versions if label in found)


def _shares(theirs: Tensor, ours: Tensor, others: Mapping[str, Tensor]) -> dict[str, float]:
    """The base's share, under "", and those of the chosen versions, in the order in which they were chosen."""
    step = max(1, theirs.numel() // _SAMPLE)
    sample = theirs[::step].double()
    known = torch.isfinite(sample) & (sample != 0)
    if int(known.sum()) < _FEWEST:
        return {}
    sample = sample[known]
    columns = {"": ours[::step][known].double()} | {label: v[::step][known].double() for label, v in others.items()}
    chosen, shares = [""], [1.0]
    least = float((sample - columns[""]).abs().median())
    while tries := [label for label in others if label not in chosen]:
        fits = {label: _fit(sample, [columns[name] for name in (*chosen, label)]) for label in tries}
        best = min(fits, key=lambda label: fits[label][0])
        if not fits[best][0] < _FALLS * least:
            break
        least, shares = fits[best]
        chosen.append(best)
    return dict(zip(chosen, shares, strict=True))


def _fit(sample: Tensor, columns: list[Tensor]) -> tuple[float, list[float]]:
    """The median absolute residual of the sample, and the shares, by least squares."""
    matrix = torch.stack(columns, 1)
    shares = torch.linalg.lstsq(matrix.T @ matrix, (matrix.T @ sample)[:, None], driver="gelsd").solution[:, 0]
    return float((sample - matrix @ shares).abs().median()), shares.tolist()


def _plain(tensor: Tensor) -> Tensor:
    dense = tensor.dequantize() if tensor.is_quantized else tensor
    return dense.detach().cpu().float().flatten()
