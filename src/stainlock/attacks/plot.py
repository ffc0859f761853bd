"""The table as a picture: performance and verification after each attack. Readable in greyscale."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stainlock.attacks.rows import Row
from stainlock.errors import FileError
from stainlock.storage.durable import write_file

_SURE = -6.0  # log10 of the p-value at which a stain counts as found
_DEEPEST = -1000.0  # smaller log10 p-values are drawn here


def plot_rows(rows: Sequence[Row], path: Path) -> None:
    """Draws one line with a dot per row; does nothing without matplotlib, which is an extra."""
    try:
        content = render(rows)
    except FileError:
        return
    write_file(path, content)


def render(rows: Sequence[Row]) -> bytes:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise FileError("plots need matplotlib: pip install stainlock[plot]") from error
    shown = [row for row in rows if row.applied]
    with matplotlib.rc_context({"font.size": 8}):
        figure: Any = Figure(figsize=(9, 1.6 + 0.17 * len(shown)), dpi=140, layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
        places = list(range(len(shown)))[::-1]
        names = [row.attack if row.attack == "none" else f"{row.attack}  {row.strength}" for row in shown]
        _dots(left, places, [row.performance for row in shown], "o", "0.0", "as the thief has it")
        if any(row.unlocked is not None for row in shown):
            _dots(left, places, [row.unlocked for row in shown], "D", "0.55", "with the owner's trigger")
            left.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        left.set_yticks(places, names)
        left.set_xlim(-0.02, 1.02)
        left.set_xlabel(f"performance ({next((r.metric for r in shown if r.metric), 'no labels')})")
        if any(row.by for row in shown):
            _p_values(right, places, shown)
        else:
            _dots(right, places, [row.seconds for row in shown], "s", "0.0", "")
            right.set_xscale("symlog")
            right.set_xlabel("seconds the attack took")
        for axes in (left, right):
            axes.grid(color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _dots(axes: Any, places: Sequence[int], values: Sequence[float | None], marker: str, grey: str, label: str) -> None:
    pairs = [(value, place) for value, place in zip(values, places, strict=True) if value is not None]
    if pairs:
        axes.plot(*zip(*pairs, strict=True), marker, color=grey, markersize=4, label=label, markerfacecolor="white")


def _p_values(axes: Any, places: Sequence[int], rows: Sequence[Row]) -> None:
    styles = {"weights": ("^", "0.0"), "response": ("o", "0.35"), "output": ("s", "0.6")}
    for name, (marker, grey) in styles.items():
        logs = [row.by.get(name, {}).get("log10_p_value") for row in rows]
        if any(log is not None for log in logs):
            sizes = [None if log is None else -max(log, _DEEPEST) for log in logs]
            _dots(axes, places, sizes, marker, grey, f"by {name}")
    axes.axvline(-_SURE, color="0.0", linewidth=0.9, linestyle="--")
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(-0.5, -1.5 * _DEEPEST)
    axes.set_xlabel(f"−log10 p of each verification, up to {-_DEEPEST:g}; right of the dashed line the stain is found")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
