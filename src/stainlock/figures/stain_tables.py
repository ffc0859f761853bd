"""Tables of a staining figure: responses by threshold, performance by detector, and a summary by layer."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from stainlock.figures.figure import Rows, Setup

# label, line style, grey, marker
BOUNDS: dict[str, tuple[str, Any, str, str]] = {
    "theorem1_printed": ("Theorem 1 as printed", (0, (1, 1.5)), "0.6", ""),
    "theorem1": ("Theorem 1 corrected", (0, (6, 2)), "0.45", ""),
    "theorem2": ("Theorem 2", (0, (6, 2)), "0.0", "s"),
    "clopper_pearson": ("Clopper–Pearson (ours)", "-", "0.0", "o"),
    "cap": ("spherical cap (ours)", "-", "0.45", "^"),
}
_HEADINGS = {"theorem1": "Theorem 1", "theorem2": "Theorem 2", "clopper_pearson": "C–P", "cap": "cap"}


def response_table(rows: Rows, layers: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each layer and threshold: counts summed over shards and detectors, bounds averaged over detectors."""
    found = []
    for layer in layers:
        own = [r for r in rows if r.get("part") in ("bounds", "responses") and r["layer"] == layer]
        natural = {
            "largest_natural": max(r["largest_natural"] for r in own),
            "triggers_reached": len({(r.get("detector"), i) for r in own for i in r["reached"]}),
            "least_trigger": min(r["least_trigger"] for r in own),
            "largest_trigger": max(r["largest_trigger"] for r in own),
        }
        for index in sorted({r["index"] for r in own}):
            bounds = [r for r in own if r["index"] == index and r["part"] == "bounds"]
            seen = [r for r in own if r["index"] == index and r["part"] == "responses"]
            part = bounds[0]["threshold"] / bounds[0]["least_trigger"]
            count, samples = sum(r["exceedances"] for r in seen), sum(r["positions"] * r["detectors"] for r in seen)
            found.append(
                {name: bounds[0][name] for name in ("layer", "dimension", "added")}
                | {"part": part, "threshold": part * natural["least_trigger"]}
                | {"detectors": sum(r["detectors"] for r in bounds), "samples": samples, "exceedances": count}
                | {"empirical": count / samples if samples else math.nan}
                | natural
                | {name: statistics.mean(r[name] for r in bounds) for name in ("cantelli", *BOUNDS)}
            )
    return found


def performance_table(rows: Rows, setup: Setup) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Each stain's performance, averaged over shards, and the original model's."""
    sums: dict[tuple[str, str, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        if row.get("part") == "performance":
            total = sums[row["setting"], row["layer"], row["detector"], row["metric"]]
            total[0] += row["value"] * row["weight"]
            total[1] += row["weight"]
    originals = {metric: total / n for (setting, _, _, metric), (total, n) in sums.items() if setting == "original"}
    table = [
        {"layer": layer, "detector": detector, "metric": metric, "stained": total / n, "original": originals[metric],
         "change": total / n - originals[metric]}
        for (setting, layer, detector, metric), (total, n) in sums.items() if setting == "stained"
    ]  # fmt: skip
    return table, originals


def summary_table(
    responses: list[dict[str, Any]], performance: list[dict[str, Any]], originals: dict[str, float], setup: Setup
) -> list[dict[str, Any]]:
    """One row for each layer: bounds at the trigger's response, and mean performance before and after."""
    found = []
    for layer in setup.layers:
        row = at_trigger(responses, layer)
        for metric, before in originals.items():
            after = [r["stained"] for r in performance if r["layer"] == layer and r["metric"] == metric]
            row |= {f"{metric} before": before, f"{metric} after": statistics.mean(after)}
        found.append(row)
    return found


def at_trigger(responses: list[dict[str, Any]], layer: str) -> dict[str, Any]:
    """The largest natural responses in a layer, and the bounds at the trigger's response."""
    top = next(row for row in responses if row["layer"] == layer and row["part"] >= 1)
    row = {"layer": layer, "d": top["dimension"], "detectors": top["detectors"], "added": top["added"],
           "natural ÷ trigger": top["largest_natural"] / top["least_trigger"],
           "triggers reached": top["triggers_reached"]}  # fmt: skip
    return row | {heading: top[name] for name, heading in _HEADINGS.items()}


def shown_columns(row: dict[str, Any]) -> tuple[str, ...]:
    """The columns that the report shows, few enough for a page; the CSV file has all of them."""
    return tuple(name for name in row if name not in ("detectors", "added", "triggers reached", "natural ÷ trigger"))


def reached_finding(summary: list[dict[str, Any]], what: str) -> str:
    """How many false positives there were, and how close natural inputs came."""
    reached = sum(row["triggers reached"] for row in summary)
    count = sum(row["detectors"] for row in summary)
    largest = max(row["natural ÷ trigger"] for row in summary)
    return (
        f"False positives (a natural input responds as strongly as the trigger): {reached} of {count} {what}. The"
        f" largest natural response is {largest:.0%} of the weakest trigger's."
    )


def stain_findings(summary: list[dict[str, Any]], metrics: list[str]) -> list[str]:
    """Sentences on false positives, on stains that were added to a neuron, and on the change of performance."""
    found = [reached_finding(summary, "stains")]
    if added := [row["layer"] for row in summary if row["added"]]:
        found.append(
            f"In {', '.join(added)} no neuron can be replaced by a silent detector, so the detector was added to an"
            " existing neuron."
        )
    for metric in metrics:
        changes = [row[f"{metric} after"] - row[f"{metric} before"] for row in summary]
        low, high = (f"{value:+.3g}".replace("-", "−") for value in (min(changes), max(changes)))
        change = f"mean change {low}" if low == high else f"mean change {low} to {high}, depending on the layer"
        if not any(changes):
            change = "unchanged in every layer"
        found.append(f"{metric}: {summary[0][f'{metric} before']:.4g} before staining; {change}.")
    return found
