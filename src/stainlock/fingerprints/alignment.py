"""A suspect's tensors under the base's names, in the base's order and scale.

The same function can be written in many ways: channels in another order, rescaled, with dummy neurons between them,
batch norms folded in, columns scrambled by a keyed lock, tensors renamed or transposed by an exporter. Instead of a
tensor W of the base, the suspect then has

    S[i', j'] = r_i · c_j · W[i, j]          with i' = rows(i) and j' = columns(j)

Since S is otherwise close to W, rows and columns can be identified by their directions. One order must be known to find
the other, so orders are passed on from tensor to tensor: an order found for one axis is tried for every other axis of
the same width. Starting from the inputs, whose order is known, this covers the network without needing its graph.

Nothing here uses any client's code, so tracing stays valid no matter what is matched with what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stainlock.fingerprints.mixing import unmixed
from stainlock.storage.weights import PREFIXES

ALIKE = 0.5  # two rows with a higher cosine are taken for the same
_ALIGNED = 0.9  # tensors with a higher cosine, or orders with a higher share of matches, are taken as they are
_SHARE = 0.5  # share of the rows that must have a match
_RESCALED = 2.0  # gains are removed if they differ from 1 by more than this multiple of what noise explains
_ENTRIES = 1024  # of a row that are compared to find its match, about: saves time
_WIDENED = 4  # times as many channels as the base, at most: beyond that it is another tensor, and takes memory
_CANDIDATES = 16  # tensors of another name to try, at most
_ROUNDS = 3

Order = Tensor  # for each slice of the base the index of the suspect's slice, or −1


@dataclass(frozen=True)
class Aligned:
    """The suspect's tensors in the base's form; NaN where a slice has no counterpart.

    ``changed`` says, for each tensor that had to be aligned, what was done to it.
    """

    weights: dict[str, Tensor]
    changed: dict[str, str]


def align(suspect: Mapping[str, Any], base: Mapping[str, Tensor]) -> Aligned:
    """Find every tensor of the base that the suspect has in some form; others are left out."""
    given = _floats(_without_prefixes(suspect, base))
    left = {name: tensor.detach().cpu().float() for name, tensor in base.items() if tensor.dim() >= 2}
    weights: dict[str, Tensor] = {}
    changed: dict[str, str] = {}
    orders: list[Order] = []
    for _ in range(_ROUNDS):
        before = len(left)
        for name, ours in list(left.items()):
            for other, theirs in _candidates(name, ours, given):
                found = _fitted(theirs, ours, orders)
                if found is None:
                    continue
                weights[name], done = found
                notes = [note for note in (f"found as {other}" if other != name else "", done) if note]
                if notes:
                    changed[name] = ", ".join(notes)
                del left[name], given[other]
                break
        if len(left) == before:
            break
    return Aligned(weights, changed)


def _candidates(name: str, ours: Tensor, given: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensor of that name first, then others of the same shape, transposed ones included."""
    if name in given and given[name].dim() == ours.dim():
        yield name, given[name]
    others = [(other, tensor) for other, tensor in given.items() if other != name and tensor.shape == ours.shape]
    if ours.dim() == 2:
        others += [(other, tensor.T) for other, tensor in given.items() if tensor.shape == ours.T.shape]
    yield from others[:_CANDIDATES]


def _fitted(theirs: Tensor, ours: Tensor, orders: list[Order]) -> tuple[Tensor, str] | None:
    """The suspect's tensor in the base's order and scale, and what was done to it; None if it is another tensor."""
    if theirs.shape == ours.shape and _cosine(theirs, ours) > _ALIGNED:
        return _rescaled(theirs, ours, "")
    if theirs.shape[2:] != ours.shape[2:] or any(theirs.shape[i] > _WIDENED * ours.shape[i] for i in (0, 1)):
        return None
    share, rows, columns = _told(theirs, ours, 0, orders)
    if share <= _ALIGNED:  # the other way round: assume the order of the rows, search for that of the columns
        other_share, other_columns, other_rows = _told(theirs, ours, 1, orders)
        if other_share > share:
            share, rows, columns = other_share, other_rows, other_columns
    if share <= _SHARE:
        turned_back = unmixed(theirs, ours)
        return None if turned_back is None else (turned_back, "mixed channels separated")
    for order in (rows, columns):
        if order is not None and not any(torch.equal(order, known) for known in orders):
            orders.append(order)
    return _rescaled(_taken(_taken(theirs, rows, 0), columns, 1), ours, "reordered")


def _told(theirs: Tensor, ours: Tensor, axis: int, orders: list[Order]) -> tuple[float, Order | None, Order | None]:
    """The share of slices along ``axis`` that have a match, their order, and the known order of the other axis."""
    best: tuple[float, Order | None, Order | None] = (0.0, None, None)
    other = 1 - axis
    for known in (None, *(order for order in reversed(orders) if len(order) == ours.shape[other])):
        width = theirs.shape[other]
        fits = width == ours.shape[other] if known is None else int(known.max()) < width
        if fits and ours.shape[axis] > 1:
            found, share = _match(*(t.transpose(0, axis) for t in (_taken(theirs, known, other), ours)))
            best = max(best, (share, found, known), key=lambda one: one[0])
        if best[0] > _ALIGNED:
            break
    return best


def _match(theirs: Tensor, ours: Tensor) -> tuple[Order, float]:
    """For each row of ours the row of theirs with its direction, or −1; and the share of our rows with a match."""
    b = ours.flatten(1)
    a = theirs.flatten(1).nan_to_num(nan=0.0)
    step = max(1, b.shape[1] // _ENTRIES)
    a, b = (torch.nn.functional.normalize(rows[:, ::step], dim=1) for rows in (a, b))
    cosines, order = (b @ a.T).abs().max(1)
    best = torch.zeros(len(a)).scatter_reduce(0, order, cosines, "amax")
    alike = (cosines > ALIKE) & (cosines >= best[order])  # each of theirs matches at most one of ours
    living = b.abs().sum(1) > 0
    return torch.where(alike, order, -1), float(alike[living].float().mean()) if bool(living.any()) else 0.0


def _taken(tensor: Tensor, order: Order | None, axis: int) -> Tensor:
    if order is None:
        return tensor
    taken = tensor.index_select(axis, order.clamp(min=0))
    missing = (order < 0).nonzero().flatten()
    return taken.index_fill(axis, missing, float("nan")) if len(missing) else taken


def _rescaled(theirs: Tensor, ours: Tensor, done: str) -> tuple[Tensor, str]:
    """Fit the gains of rows and columns by alternating least squares, and divide by them if they differ from 1."""
    known = torch.isfinite(theirs) & (theirs != 0)  # pruned weights say nothing about gains
    s = torch.where(known, theirs, 0.0).reshape(len(theirs), theirs.shape[1], -1)
    w = torch.where(known, ours, 0.0).reshape(s.shape)
    noise = float((s - w).norm() / w.norm().clamp(min=1e-30))
    r, c = _gain(s, w, (1, 2)), _gain(s, w, (0, 2))
    expected = [_RESCALED * noise / (s.numel() / gains.numel()) ** 0.5 for gains in (r, c)]
    if all(float((gains - 1).abs().median()) <= most for gains, most in zip((r, c), expected, strict=True)):
        return theirs, done
    for _ in range(_ROUNDS):
        c = _gain(s, w * r, (0, 2)) if s.shape[1] > 1 else torch.ones(1, 1, 1)
        r = _gain(s, w * c, (1, 2))
    fitted = theirs / (r * c).view(len(s), s.shape[1], *(1,) * (theirs.dim() - 2))
    return fitted, ", ".join(note for note in (done, "rescaled") if note)


def _gain(s: Tensor, w: Tensor, axes: tuple[int, int]) -> Tensor:
    gain = (s * w).sum(axes, keepdim=True) / (w * w).sum(axes, keepdim=True)
    return torch.where(torch.isfinite(gain) & (gain != 0), gain, 1.0)


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten().nan_to_num(), b.flatten(), dim=0))


def _floats(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Matrices and kernels in float32. Quantised linear layers store weight and bias as a pair."""
    found = {}
    for name, value in tensors.items():
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if not isinstance(tensor, Tensor) or tensor.dim() < 2:
                continue
            dense = tensor.dequantize() if tensor.is_quantized else tensor
            if dense.is_floating_point():
                found[name] = dense.detach().cpu().float()
    return found


def _without_prefixes(suspect: Mapping[str, Any], base: Mapping[str, Tensor]) -> dict[str, Any]:
    """Names without the prefixes that wrappers add to all of them."""
    found = dict(suspect)
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in found) and not any(name.startswith(prefix) for name in base):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return found
