"""Plots of staining figures: responses with every bound for each layer, and performance before and after."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from stainlock.figures.comparison import measured_stains
from stainlock.figures.figure import Drawn, Plot, Rows, Setup, Table
from stainlock.figures.frechet import extractor_note
from stainlock.figures.plots import by_layer, new_picture, short_names, tidy, widen
from stainlock.figures.stain_tables import (
    BOUNDS,
    performance_table,
    response_table,
    shown_columns,
    stain_findings,
    summary_table,
)

_DEEPEST = 1e-14  # the lowest probability on the axis; some bounds fall much further


def draw_stains(rows: Rows, setup: Setup) -> Drawn:
    """Responses with their bounds, performance by layer, and a summary."""
    responses = response_table(rows, setup.layers)
    performance, originals = performance_table(rows, setup)
    metrics = sorted({str(row["metric"]) for row in performance})
    plots = [Plot("responses", response_plot(responses, setup.layers), RESPONSES)]
    plots += [Plot("performance", _performance_plot(performance, originals, metrics, setup), _PERFORMANCE)]
    summary = summary_table(responses, performance, originals, setup)
    tables = [
        Table("summary", summary, "By layer; bounds at the trigger's response.", shown_columns(summary[0])),
        Table("responses", responses, "How often responses exceed a threshold, and the bounds on that."),
        Table("performance", performance, "Every detector's performance."),
    ]
    findings = stain_findings(summary, metrics) + extractor_note(setup)
    return Drawn(plots, tables, findings, measured_stains(summary, metrics))


RESPONSES = (
    "How often the response to a natural input exceeds a threshold, over all detectors (thick line, ending at the"
    " largest response seen), and the bounds on this probability. Thresholds are fractions of the weakest trigger's"
    " response, which is the vertical line at 1. Theorem 1 and the spherical cap bound it for a random detector,"
    " Theorem 2 and Clopper–Pearson (95 %) for each fixed detector; their mean is shown."
)
_PERFORMANCE = "Performance before and after staining, by layer: mean over detectors, one standard deviation shaded."


def response_plot(table: list[dict[str, Any]], layers: Sequence[str]) -> Any:
    """One panel for each layer: the share of natural responses above a threshold, and every bound on it."""
    names = dict(zip(layers, short_names(layers), strict=True))
    columns = min(2, len(layers))
    lines = math.ceil(len(layers) / columns)
    picture = new_picture(0.5 + 2.15 * lines)
    grid = picture.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in list(grid.flat)[len(layers) :]:
        axes.set_axis_off()
    for axes, layer in zip(grid.flat, layers, strict=False):
        own = [row for row in table if row["layer"] == layer]
        x = np.array([row["part"] for row in own])
        for name, (label, line, grey, marker) in BOUNDS.items():
            y = np.minimum(1, np.array([row[name] for row in own]))
            axes.plot(x, np.maximum(y, _DEEPEST / 10), linestyle=line, color=grey, marker=marker or None, markevery=6,
                      markersize=4, markerfacecolor="white", linewidth=1.0, label=label)  # fmt: skip
        seen = [row for row in own if row["exceedances"] > 0]
        if seen:
            largest = own[0]["largest_natural"] / own[0]["least_trigger"]
            ends = ([*(r["part"] for r in seen), largest], [*(r["empirical"] for r in seen), 1 / own[0]["samples"]])
            axes.plot(*ends, color="0.0", linewidth=2.6, label="natural responses")
        axes.axvline(1.0, color="0.0", linewidth=1.0)
        axes.set_yscale("log")
        axes.set_ylim(_DEEPEST, 3)
        axes.set_xlim(0, 1.08)
        low, high = own[0]["least_trigger"], own[0]["largest_trigger"]
        title = f"{names[layer]} (d = {own[0]['dimension']})\ntriggers {low:.3g} to {high:.3g}"
        axes.set_title(title, fontsize=7, loc="left")
        axes.set_xlabel("threshold ÷ weakest trigger's response", fontsize=7)
        axes.tick_params(labelsize=7)
        tidy(axes)
    for axes in grid[:, 0]:
        axes.set_ylabel("probability of exceeding it", fontsize=7)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    return picture


def _performance_plot(
    table: list[dict[str, Any]], originals: dict[str, float], metrics: list[str], setup: Setup
) -> Any:
    picture = new_picture(2.4)
    for axes, metric in zip(picture.subplots(1, len(metrics), squeeze=False).flat, metrics, strict=True):
        own: dict[str, list[float]] = defaultdict(list)
        for row in table:
            if row["metric"] == metric:
                own[row["layer"]].append(row["stained"])
        by_layer(axes, setup.layers, {"stained": own})
        axes.axhline(originals[metric], color="0.0", linestyle="--", linewidth=1.0, label="original")
        widen(axes, originals[metric])
        axes.set_ylabel(metric, fontsize=8)
        axes.legend(frameon=False, fontsize=8)
    return picture
