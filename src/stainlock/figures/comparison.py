"""Comparison of a run's numbers with those that the paper prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stainlock.figures.figure import Drawn, Figure, Setup, Table
from stainlock.figures.paper import (
    ACCURACY,
    ACCURACY_BY_LAYER,
    BOUNDED,
    DETECTORS,
    EVALUATED,
    FID,
    FID_BY_LAYER,
    LAYERS,
    REACHED,
)

NOT_MEASURED = "not measured"
_INCEPTION = "FID"  # Fréchet distances of other names use other features


def comparison(figure: Figure, setup: Setup, drawn: Drawn) -> Table | None:
    """Every number that the paper prints for a figure, with this run's value; None if it prints none."""
    images = setup.images or 0
    found = {
        DETECTORS: str(setup.detectors), LAYERS: str(len(setup.layers)), EVALUATED: f"{images:,}",
        BOUNDED: f"{setup.bound_inputs(images):,}", **drawn.measured,
    }  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"quantity": printed.quantity, "this run": found.get(printed.quantity, NOT_MEASURED), "paper": printed.value,
         "place in the paper": printed.place}
        for printed in figure.paper.printed
    ]  # fmt: skip
    return Table("paper", rows, "Numbers that the paper prints.", tuple(rows[0])) if rows else None


def measured_stains(summary: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, str]:
    """This run's values of what the paper prints for stains: false positives, change of accuracy or of FID."""
    reached, count = (sum(row[name] for row in summary) for name in ("triggers reached", "detectors"))
    found = {REACHED: f"{reached} of {count}" if reached else "none"}
    for metric in metrics:
        before, after = ([float(row[f"{metric} {when}"]) for row in summary] for when in ("before", "after"))
        if metric == "top-1":
            changes = [100 * (b - a) for a, b in zip(before, after, strict=True)]
            found |= {ACCURACY: _signed(sum(changes) / len(changes)), ACCURACY_BY_LAYER: _list(changes)}
        if metric in (_INCEPTION, "Fréchet distance") and all(before):
            changes = [100 * (b / a - 1) for a, b in zip(before, after, strict=True)]
            note = "" if metric == _INCEPTION else " (Fréchet distance, not FID)"
            found |= {FID: f"{_signed(sum(changes) / len(changes))} %{note}", FID_BY_LAYER: f"{_list(changes)} %{note}"}
    return found


def _list(values: Sequence[float]) -> str:
    return ", ".join(map(_signed, values))


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
