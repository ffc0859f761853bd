"""A certificate as a picture: how often natural responses exceed a threshold, with bounds on it.

As in the paper's staining figures the scale is logarithmic. Line styles, markers and labels at the lines distinguish
the curves, so that the picture works in black and white.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stainlock.certificates.certificate import Certificate
from stainlock.errors import FileError
from stainlock.sphere import FloatArray
from stainlock.storage.durable import write_file


@dataclass(frozen=True)
class _Style:
    label: str
    line: Any
    marker: str = ""
    grey: str = "0.0"


_DASHED, _DASH_DOT, _DOTTED = (0, (6, 2)), (0, (6, 2, 1, 2)), (0, (1, 1.5))
# Cantelli's bound and the printed constant run so close to Theorem 1 that a line of their own would only blur it.
_STYLES = {
    "theorem1": _Style("Theorem 1, corrected", _DASHED, grey="0.35"),
    "theorem1_sharp": _Style("Theorem 1, best constant", _DASH_DOT, grey="0.35"),
    "theorem2": _Style("Theorem 2", _DASHED, "s"),
    "clopper_pearson": _Style("Clopper–Pearson", "-", "o"),
    "cap_upper": _Style("spherical cap, upper", _DOTTED),
    "cap": _Style("spherical cap, mean", "-", "^"),
}
_DEEPEST = 1e-40  # the lowest probability shown; bounds may fall far below
_SIZE = (8.0, 5.0)
_LABEL_GAP = 12.0  # minimum distance between the baselines of two labels, in points


def plot_certificate(certificate: Certificate, path: str | Path) -> None:
    """Draw the certificate's curve into a new ``.png`` or ``.svg`` file, which is as secret as the certificate."""
    path = Path(path)
    kind = path.suffix.lower().lstrip(".")
    if kind not in ("png", "svg"):
        raise ValueError(f"expected a plot's file name to end in .png or .svg, got {path.name}")
    write_file(path, render(certificate, kind), secret=True)


def render(certificate: Certificate, kind: str) -> bytes:
    """The picture as bytes, the same for the same certificate."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise FileError("plots need matplotlib: pip install stainlock[plot]") from error
    settings: dict[Any, Any] = {"svg.hashsalt": "stainlock", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=_SIZE)
        axes = figure.add_axes((0.09, 0.115, 0.66, 0.77))
        _draw(axes, certificate)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {})
    return buffer.getvalue()


def _draw(axes: Any, certificate: Certificate) -> None:
    R = certificate.trigger_response
    x = np.array(certificate.curve["threshold"]) / R
    counts = np.array(certificate.curve["exceedances"])
    empirical = counts / certificate.samples
    seen = counts > 0
    lowest = max(_DEEPEST, min(certificate.bounds["cap"] / 1e3, 0.1 / certificate.samples))
    axes.set_yscale("log")
    axes.set_xlim(0, 1.06)
    axes.set_ylim(lowest, 3)
    ends: list[tuple[float, str]] = []
    for name, style in _STYLES.items():
        y = np.array(certificate.curve[name])
        every = max(1, len(x) // 8)
        offset = list(_STYLES).index(name) * every // len(_STYLES)  # so that markers of two lines rarely meet
        axes.plot(
            x, y, linestyle=style.line, marker=style.marker or None, markevery=(offset, every), markersize=4.5,
            markerfacecolor="white", color=style.grey, linewidth=1.1,
        )  # fmt: skip
        if y[-1] >= lowest:
            ends.append((float(y[-1]), style.label))
        else:
            _label_exit(axes, x, y, lowest, style.label)
    if seen.any():
        largest = certificate.largest_response / R
        tail = ([*x[seen], largest], [*empirical[seen], 1 / certificate.samples])
        axes.plot(*tail, color="0.0", linewidth=2.6, solid_capstyle="butt")
        axes.plot([largest], [1 / certificate.samples], marker="D", markersize=6, color="0.0", linestyle="none")
        axes.annotate(
            f"natural responses,\nthe largest {largest:.2f} R", (largest, 1 / certificate.samples),
            xytext=(0.025, 0.3), textcoords="axes fraction", ha="left", va="top", fontweight="bold",
            arrowprops={"arrowstyle": "-", "linewidth": 0.6, "relpos": (0.5, 1), "shrinkB": 4},
        )  # fmt: skip
    _label_ends(axes, ends)
    for place, text in ((certificate.threshold / R, "threshold"), (1.0, "trigger")):
        axes.axvline(place, color="0.0", linewidth=0.9, linestyle=_DOTTED if text == "threshold" else "-")
        axes.annotate(
            text, (place, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3), textcoords="offset points",
            ha="center", va="bottom", annotation_clip=False,
        )  # fmt: skip
    axes.set_xlabel("threshold Δ as a fraction of the trigger's response R")
    axes.set_ylabel(f"chance that a natural {certificate.level} exceeds Δ")
    axes.set_title(
        f"{certificate.site} (d = {certificate.dimension}), {certificate.images:,} images"
        f" of {certificate.positions:,} positions, confidence {certificate.confidence:g}",
        loc="left", pad=18, fontsize=9,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _label_exit(axes: Any, x: FloatArray, y: FloatArray, lowest: float, label: str) -> None:
    """A label where a curve leaves the picture downwards."""
    inside = np.flatnonzero(y >= lowest)
    if len(inside):
        at = (float(x[inside[-1]]), float(y[inside[-1]]))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the threshold's line may pass behind it
        axes.annotate(label, at, xytext=(-8, 4), textcoords="offset points", ha="right", va="bottom", bbox=box)


def _label_ends(axes: Any, ends: list[tuple[float, str]]) -> None:
    """Labels right of the curves' ends, pushed apart where they would overlap, with a thin line to their curve."""
    height = axes.get_window_extent().height * 72 / axes.figure.dpi
    low, high = np.log10(axes.get_ylim())
    points = [(np.log10(y) - low) / (high - low) * height for y, _ in ends]
    places: dict[int, float] = {}
    above = height + _LABEL_GAP
    for i in np.argsort(points)[::-1]:  # from the top: below the curves there is room
        places[int(i)] = above = min(points[i], above - _LABEL_GAP)
    line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 2, "shrinkB": 0, "relpos": (0, 0.5)}
    for i, (y, label) in enumerate(ends):
        axes.annotate(
            label, (1.06, y), xytext=(1.1, places[i] / height), textcoords=("data", "axes fraction"),
            va="center", ha="left", annotation_clip=False, arrowprops=line,
        )  # fmt: skip
