"""Drawing in grey, with markers and line styles, so that plots can be read in black and white."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from stainlock.errors import FileError

WIDTH = 5.0  # inches: text stays legible when a phone shows the whole picture
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DPI = 150
_LONG = 18  # characters; longer layer names are shortened
_LEAST_SPAN = 0.1  # smallest span of an axis, relative to the value plotted, so that small changes look small
_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "stainlock", "svg.fonttype": "none", "font.size": 9}


def check_matplotlib() -> None:
    """Fail with a clear message, before any work is done, if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise FileError("figures need matplotlib: pip install stainlock[plot]") from error


def new_picture(height: float, width: float = WIDTH) -> Any:
    """An empty matplotlib figure; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def rendered(picture: Any, kind: str) -> bytes:
    """The picture as PNG or SVG; equal numbers give equal bytes."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        picture.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata)
    return buffer.getvalue()


def tidy(axes: Any) -> None:
    """No frame at the top and right, and a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def short_names(layers: Sequence[str]) -> list[str]:
    """Layer names; if one is long, the leading dotted parts that all of them share are dropped."""
    if all(len(layer) <= _LONG for layer in layers):
        return list(layers)
    parts = [layer.split(".") for layer in layers]
    same = 0
    while len(parts) > 1 and all(len(p) > same + 1 for p in parts) and len({p[same] for p in parts}) == 1:
        same += 1
    if same and all(p[same].isdigit() for p in parts):  # keep one more part: a number alone says little
        same -= 1
    return [".".join(p[same:]) for p in parts]


def by_layer(
    axes: Any, layers: Sequence[str], lines: Mapping[str, Mapping[str, Sequence[float]]], *, dashed: Sequence[str] = ()
) -> None:
    """One line for each setting over the layers: means, with one standard deviation shaded above and below."""
    places = np.arange(len(layers))
    for number, (setting, values) in enumerate(lines.items()):
        own = [np.array(values.get(layer, []), dtype=float) for layer in layers]
        mean = np.array([v.mean() if len(v) else math.nan for v in own])
        deviation = np.array([v.std() if len(v) else math.nan for v in own])
        grey = str(round(0.6 * number / max(1, len(lines) - 1), 2))
        axes.plot(
            places, mean, color=grey, marker=MARKERS[number % len(MARKERS)], markersize=5, markerfacecolor="white",
            linestyle="--" if setting in dashed else "-", label=setting, linewidth=1.2,
        )  # fmt: skip
        axes.fill_between(places, mean - deviation, mean + deviation, color=grey, alpha=0.15, linewidth=0)
    slanted = {"rotation": 25, "ha": "right"} if len(layers) > 2 else {}
    axes.set_xticks(places, short_names(layers), fontsize=7, **slanted)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(x=0.08)
    tidy(axes)


def widen(axes: Any, about: float) -> None:
    """Widen the y axis so that it spans at least a tenth of ``about``."""
    low, high = axes.get_ylim()
    missing = _LEAST_SPAN * abs(about) - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def bars(axes: Any, values: Mapping[str, Sequence[float]]) -> None:
    """One bar for each setting: the mean with its number, and one standard deviation as error bar."""
    names = list(values)[::-1]
    means = [float(np.mean(values[name])) for name in names]
    deviations = [float(np.std(values[name])) for name in names]
    axes.barh(names, means, xerr=deviations, color="0.75", edgecolor="black", linewidth=0.6, height=0.6)
    for place, mean in enumerate(means):
        axes.annotate(f" {mean:.3g}", (mean, place), va="center", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.margins(x=0.2)
    axes.spines[["top", "right"]].set_visible(False)


def image_rows(pictures: Sequence[tuple[str, bytes]], *, columns: int = 1) -> Any:
    """PNG pictures in a grid, each under its title, with their aspect ratios kept."""
    images = [(title, Image.open(io.BytesIO(content)).convert("RGB")) for title, content in pictures]
    rows = math.ceil(len(images) / columns)
    share = WIDTH / columns
    heights = [max(i.height / i.width for _, i in images[r * columns : (r + 1) * columns]) * share for r in range(rows)]
    lines = max(title.count("\n") + 1 for title, _ in images)
    picture = new_picture(sum(heights) + (0.12 + 0.12 * lines) * rows)
    grid = picture.subplots(rows, columns, squeeze=False, height_ratios=heights)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (title, image) in zip(grid.flat, images, strict=False):
        axes.imshow(np.asarray(image), interpolation="nearest")
        axes.set_title(title, fontsize=6.5, loc="left")
    return picture


def encoded(content: bytes) -> str:
    """Bytes as base64 text, for a row of JSON."""
    return base64.b64encode(content).decode()


def decoded(text: str) -> bytes:
    """The inverse of `encoded`."""
    return base64.b64decode(text)
