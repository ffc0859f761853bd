"""A scan of the weights for conduits: rows, columns and biases that are unlike the others of their layer.

For every row and column the scan takes the norm, the share of its largest element, and the bias, each as a robust
z-score (distance from the layer's median in units of the median absolute deviation). Those that stand out most are set
to zero, or scaled to the layer's usual size. ``rank`` is the rank of the lock's first own row or column among all of
them, and ``flagged`` counts those that stand out; ``flagged_in_original`` is the same for the model before locking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stainlock.attacks.attack import Attack, Attacked, NotApplicable, Strength, Subject
from stainlock.attacks.changes import edited, weighted_layers
from stainlock.numerics import exact, has
from stainlock.plan import Write

_STANDS_OUT = 8.0  # z-score
_NOTHING = 1e-6  # norms below this, relative to the layer's largest, count as zero
_MOST = 0.02  # fraction of all rows and columns; changing more would ruin the model


@dataclass(frozen=True)
class Odd:
    """A row (axis 0) or column (axis 1) of a layer, and how far it stands out."""

    layer: str
    axis: int
    index: int
    score: float


def scan(model: nn.Module) -> list[Odd]:
    """All rows and columns, those that stand out most first."""
    found = []
    for name, layer in weighted_layers(model):
        if isinstance(layer, nn.ConvTranspose2d) or getattr(layer, "groups", 1) != 1:
            continue
        weight = exact(layer, "weight")
        for axis in (0, 1):
            lines = weight.transpose(0, axis).flatten(1)
            if len(lines) < 8 or lines.shape[1] < 8:
                continue
            norms, largest = lines.norm(dim=1), lines.abs().amax(1)
            floor = _NOTHING * norms.max().clamp(min=1e-30)  # so zeros have a logarithm
            norms, largest = norms.clamp(min=floor), largest.clamp(min=floor / lines.shape[1] ** 0.5)
            score = torch.maximum(_robust(norms.log()), _robust((largest / norms).log()))
            if axis == 0 and has(layer, "bias"):
                score = torch.maximum(score, _robust(exact(layer, "bias")))
            found += [Odd(name, axis, i, value) for i, value in enumerate(score.tolist())]
    return sorted(found, key=lambda odd: -odd.score)


def _robust(values: Tensor) -> Tensor:
    apart = (values - values.median()).abs()
    return apart / (1.4826 * apart.median() + 1e-3 * apart.max() + 1e-30)


def _changed(model: nn.Module, odd: Odd, how: str) -> None:
    layer: Any = model.get_submodule(odd.layer)
    weight: Tensor = layer.weight.data
    lines = weight.transpose(0, odd.axis)
    norms = lines.flatten(1).norm(dim=1)
    lines[odd.index] *= 0.0 if how == "zero" else float(norms.median() / norms[odd.index].clamp(min=1e-30))
    if odd.axis == 0 and layer.bias is not None:
        layer.bias.data[odd.index] = 0.0 if how == "zero" else layer.bias.data.median()


def _run(subject: Subject, strength: Strength) -> Attacked:
    ranked = scan(subject.target.model)
    chosen = [odd for odd in ranked if odd.score > _STANDS_OUT][: max(1, int(_MOST * len(ranked)))]
    if not chosen:
        raise NotApplicable("no row or column of any layer stands out")

    def change(model: nn.Module) -> None:
        for odd in chosen:
            _changed(model, odd, str(strength))

    return Attacked(edited(subject.target, change), figures=_figures(subject, ranked))


def _figures(subject: Subject, ranked: list[Odd]) -> dict[str, float]:
    """Only for the report: the owner knows which rows belong to the lock."""
    key = subject.need_key()
    own = _written(key.revert.writes, subject.target.model)
    places = [place for place, odd in enumerate(ranked, 1) if (odd.layer, odd.axis, odd.index) in own]
    before = scan(key.original(subject.target).model)
    return {
        "flagged": sum(odd.score > _STANDS_OUT for odd in ranked),
        "flagged_in_original": sum(odd.score > _STANDS_OUT for odd in before),
        **({"rank": places[0], "own": len(places), "of": len(ranked)} if places else {}),
    }


def _written(writes: Iterable[Write], model: nn.Module) -> set[tuple[str, int, int]]:
    """Single rows and columns that a plan writes; writes to several rows and columns are not counted."""
    own = set()
    state = model.state_dict()
    for w in writes:
        name, _, kind = w.parameter.rpartition(".")
        if kind != "weight" or w.parameter not in state or state[w.parameter].dim() < 2:
            continue
        rows, columns = torch.unravel_index(w.elements, state[w.parameter].shape)[:2]
        for axis, places in enumerate((rows.unique(), columns.unique())):
            if len(places) == 1:
                own.add((name, axis, int(places)))
    return own


ATTACK = Attack("scan-weights", "thief", ("lock",), "nothing", ("zero", "usual-size"), _run,
                "set rows and columns that stand out to zero, or to their layer's usual size")  # fmt: skip
