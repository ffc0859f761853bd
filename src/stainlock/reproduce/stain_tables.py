"""What a staining figure's rows add up to: responses by threshold, performance by detector, and a summary."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import Any

from stainlock.reproduce.figure import Rows, Setup

# label, line style, grey, marker
BOUNDS: dict[str, tuple[str, Any, str, str]] = {
    "theorem1_printed": ("Theorem 1 as printed", (0, (1, 1.5)), "0.6", ""),
    "theorem1": ("Theorem 1 corrected", (0, (6, 2)), "0.45", ""),
    "theorem2": ("Theorem 2", (0, (6, 2)), "0.0", "s"),
    "clopper_pearson": ("Clopper–Pearson (ours)", "-", "0.0", "o"),
    "cap": ("spherical cap (ours)", "-", "0.45", "^"),
}
_HEADINGS = {"theorem1": "Theorem 1", "theorem2": "Theorem 2", "clopper_pearson": "C–P", "cap": "cap"}
_SAME = ("layer", "dimension", "threshold", "least_trigger", "largest_trigger", "detectors", "added")


def response_table(rows: Rows, setup: Setup) -> list[dict[str, Any]]:
    """One row a layer and threshold: shards added up, bounds beside."""
    found = []
    for layer in setup.layers:
        bounds = [r for r in rows if r.get("part") == "bounds" and r["layer"] == layer]
        counts: dict[float, int] = defaultdict(int)
        positions: dict[float, int] = defaultdict(int)
        own = [r for r in rows if r.get("part") == "responses" and r["layer"] == layer]
        for row in own:
            counts[row["threshold"]] += row["exceedances"]
            positions[row["threshold"]] += row["positions"] * row["detectors"]
        for row in bounds:
            t = row["threshold"]
            natural = [*own, row]
            found.append(
                {name: row[name] for name in _SAME}
                | {"part": t / row["least_trigger"], "samples": positions[t], "exceedances": counts[t]}
                | {"empirical": counts[t] / positions[t] if positions[t] else math.nan}
                | {"largest_natural": max(r["largest_natural"] for r in natural)}
                | {"triggers_reached": len({i for r in natural for i in r["reached"]})}
                | {name: row[name] for name in ("cantelli", *BOUNDS)}
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
        top = next(row for row in responses if row["layer"] == layer and row["part"] >= 1)
        row = {"layer": layer, "d": top["dimension"], "detectors": top["detectors"], "added": top["added"],
               "natural ÷ trigger": top["largest_natural"] / top["least_trigger"],
               "triggers reached": top["triggers_reached"]}  # fmt: skip
        row |= {heading: top[name] for name, heading in _HEADINGS.items()}
        for metric, before in originals.items():
            after = [r["stained"] for r in performance if r["layer"] == layer and r["metric"] == metric]
            row |= {f"{metric} before": before, f"{metric} after": statistics.mean(after)}
        found.append(row)
    return found


def shown_columns(row: dict[str, Any]) -> tuple[str, ...]:
    """The columns of the report's table, which must fit a page; the file has all."""
    return tuple(name for name in row if name not in ("detectors", "added", "triggers reached", "natural ÷ trigger"))


def stain_findings(summary: list[dict[str, Any]], metrics: list[str]) -> list[str]:
    reached = sum(row["triggers reached"] for row in summary)
    stains = sum(row["detectors"] for row in summary)
    largest = max(row["natural ÷ trigger"] for row in summary)
    found = [f"Natural inputs reach the trigger's response of {reached} of {stains} stains; the largest natural"
             f" response is {largest:.2f} of the weakest trigger's."]  # fmt: skip
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
