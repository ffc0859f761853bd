"""What a staining figure's rows add up to: responses by threshold, performance by detector, and a summary."""

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
    """One row a layer and threshold: shards and detectors added up, the mean of the bounds beside."""
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
    """Every stain's number, shards added up; and the original's."""
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
    found = []
    for layer in setup.layers:
        row = at_trigger(responses, layer)
        for metric, before in originals.items():
            after = [r["stained"] for r in performance if r["layer"] == layer and r["metric"] == metric]
            row |= {f"{metric} before": before, f"{metric} after": statistics.mean(after)}
        found.append(row)
    return found


def at_trigger(responses: list[dict[str, Any]], layer: str) -> dict[str, Any]:
    """What natural inputs reach in a layer, and the bounds at the trigger's response."""
    top = next(row for row in responses if row["layer"] == layer and row["part"] >= 1)
    row = {"layer": layer, "d": top["dimension"], "detectors": top["detectors"], "added": top["added"],
           "natural ÷ trigger": top["largest_natural"] / top["least_trigger"],
           "triggers reached": top["triggers_reached"]}  # fmt: skip
    return row | {heading: top[name] for name, heading in _HEADINGS.items()}


def shown_columns(row: dict[str, Any]) -> tuple[str, ...]:
    """The columns of the report's table, which must fit a page; the file has all."""
    return tuple(name for name in row if name not in ("detectors", "added", "triggers reached", "natural ÷ trigger"))


def reached_finding(summary: list[dict[str, Any]], what: str) -> str:
    reached = sum(row["triggers reached"] for row in summary)
    count = sum(row["detectors"] for row in summary)
    largest = max(row["natural ÷ trigger"] for row in summary)
    return (
        f"Natural inputs reach the trigger's response of {reached} of {count} {what}; the largest natural"
        f" response is {largest:.2f} of the weakest trigger's."
    )


def stain_findings(summary: list[dict[str, Any]], metrics: list[str]) -> list[str]:
    found = [reached_finding(summary, "stains")]
    if added := [row["layer"] for row in summary if row["added"]]:
        found.append(
            f"In {', '.join(added)} no neuron can be replaced by a detector that is silent: it was added to one."
        )
    for metric in metrics:
        changes = [row[f"{metric} after"] - row[f"{metric} before"] for row in summary]
        low, high = f"{min(changes):+.3g}", f"{max(changes):+.3g}"
        change = f"is {low} in every layer" if low == high else f"by layer is between {low} and {high}"
        found.append(f"{metric}: {summary[0][f'{metric} before']:.4g} before; the mean change {change}.")
    return found
