"""Figures as PNG, readable in black and white."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_NAMED, _LONGEST_LABEL = 6, 28  # most accused clients that a plot names, and most characters of a name


def response_histogram(natural: Tensor, threshold: float, trigger: float) -> bytes:
    """Histogram of the responses to natural images, with the trigger's response and the firing threshold marked.

    It is small, with large letters, so that it can be read on a phone.
    """
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(5.4, 3.4), dpi=220, layout="constrained")
    axes = figure.subplots()
    values = natural.double().cpu().numpy()
    axes.hist(values, bins=40, color="0.45", edgecolor="black", linewidth=0.5)
    axes.set_yscale("log")
    axes.axvline(threshold, color="black", linestyle="--", linewidth=1.2)
    axes.axvline(trigger, color="black", linewidth=2.5)
    top = axes.get_ylim()[1]
    axes.text(threshold, top, "fires above  ", ha="right", va="top", fontsize=10)
    axes.text(trigger, top, "trigger  ", ha="right", va="top", fontsize=10, fontweight="bold")
    axes.set_xlabel("response of the detector", fontsize=11)
    axes.set_ylabel("positions (log scale)", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def score_histogram(scores: NDArray[np.float64], threshold: float, accused: Sequence[tuple[str, float]]) -> bytes:
    """Histogram of all clients' scores, with the threshold and the names of the clients beyond it.

    It is small, with large letters, so that it can be read on a phone.
    """
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(5.4, 3.4), dpi=220, layout="constrained")
    axes = figure.subplots()
    named = np.array([z for _, z in accused])
    others = scores[~np.isin(scores, named)]
    if len(others):
        axes.hist(others, bins=min(60, max(8, len(others) // 5)), color="0.4")
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)
    least, most = (float(end) for end in (min((*others, *named, -threshold)), max((*named, 2 * threshold))))
    axes.set_xlim(least - 0.04 * (most - least), most + 0.04 * (most - least))
    for bound in (threshold, -threshold) if (named < 0).any() else (threshold,):
        axes.axvline(bound, color="black", linestyle="--", linewidth=1.2)
    low, top = axes.get_ylim()
    axes.set_ylim(low, top**1.5 / low**0.5)  # room for names above
    axes.text(threshold, axes.get_ylim()[1], " threshold", ha="left", va="top", fontsize=10)
    _label(axes, [one for one in accused if one[1] > 0], "right")
    _label(axes, [one for one in accused if one[1] < 0], "left")
    axes.set_xlabel("score z of a client", fontsize=11)
    axes.set_ylabel("clients (log scale)", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _label(axes: Any, accused: Sequence[tuple[str, float]], side: str) -> None:
    """A mark for each of the accused, and their names on one side with a line to the marks."""
    if not accused:
        return
    named = np.array([z for _, z in accused])
    axes.plot(named, np.ones(len(named)), "v", color="black", markersize=8, clip_on=False)
    axes.annotate(
        _listed(accused), (named.mean(), 1.3), (0.98 if side == "right" else 0.02, 0.82), ha=side, va="top",
        textcoords="axes fraction", fontsize=10, fontweight="bold", arrowprops={"arrowstyle": "-", "linewidth": 0.6},
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )  # fmt: skip


def _listed(accused: Sequence[tuple[str, float]]) -> str:
    """Names, one per line, those with scores farthest from zero first."""
    names = [name for name, _ in sorted(accused, key=lambda one: -abs(one[1]))]
    short = [
        name if len(name) <= _LONGEST_LABEL else name[: _LONGEST_LABEL - 1].rstrip() + "…" for name in names[:_NAMED]
    ]
    return "\n".join([*short, *([f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else [])])
