"""Figures as PNG, readable in black and white."""

from __future__ import annotations

import io
from typing import Any

from torch import Tensor


def response_histogram(natural: Tensor, threshold: float, trigger: float) -> bytes:
    """Responses to natural images against the trigger's, with the level between at which the detector fires."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7.2, 3.4), dpi=160, layout="constrained")
    axes = figure.subplots()
    values = natural.double().cpu().numpy()
    axes.hist(values, bins=40, color="0.45", edgecolor="black", linewidth=0.5)
    axes.set_yscale("log")
    axes.axvline(threshold, color="black", linestyle="--", linewidth=1.2)
    axes.axvline(trigger, color="black", linewidth=2.5)
    top = axes.get_ylim()[1]
    axes.text(threshold, top, "fires above  ", ha="right", va="top", fontsize=9)
    axes.text(trigger, top, "trigger  ", ha="right", va="top", fontsize=9, fontweight="bold")
    axes.set_xlabel("response of the detector")
    axes.set_ylabel("positions (log scale)")
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()
