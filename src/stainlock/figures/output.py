"""A figure's folder: its plots, the numbers behind them, and what made them."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from stainlock import __version__
from stainlock.figures.figure import Drawn, Figure, Setup
from stainlock.figures.plots import rendered
from stainlock.figures.report import RECORD
from stainlock.storage.files import write_file
from stainlock.sweeps.journal import plain

CONFIGURATION = "configuration.json"
_PACKAGES = ("torch", "torchvision", "timm", "diffusers", "numpy", "scipy", "matplotlib", "pycocotools", "torchmetrics")


def write_figure(
    folder: Path, figure: Figure, setup: Setup, drawn: Drawn, *, quick: bool, seconds: float
) -> list[Path]:
    """Plots as PNG and SVG, tables as CSV, the configuration, and the record that the report is made of."""
    files = {f"{plot.name}.{kind}": rendered(plot.picture, kind) for plot in drawn.plots for kind in ("png", "svg")}
    files |= {f"{table.name}.csv": csv_bytes(table.rows) for table in drawn.tables}
    configuration = {"figure": figure.name, "quick": quick, "setup": setup.facts(), "seconds": round(seconds, 1)}
    files[CONFIGURATION] = _json(configuration | {"versions": versions()})
    record = {
        "figure": figure.name, "group": figure.group, "title": figure.title, "shows": figure.shows,
        "stands_for": setup.stands_for, "quick": quick, "model": setup.model, "seconds": seconds,
        "layers": list(setup.layers), "detectors": setup.detectors, "images": setup.images,
        "findings": drawn.findings,
        "plots": [{"file": f"{p.name}.png", "caption": p.caption, "photographic": p.photographic} for p in drawn.plots],
        "tables": [
            {"file": f"{t.name}.csv", "caption": t.caption, "shown": list(t.shown),
             "rows": [{c: row.get(c) for c in t.shown} for row in t.rows] if t.shown else []}
            for t in drawn.tables
        ],
    }  # fmt: skip
    files[RECORD] = _json(record)
    for name, content in files.items():
        write_file(folder / name, content)
    return [folder / name for name in files]


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {"stainlock": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def csv_bytes(rows: Sequence[dict[str, Any]]) -> bytes:
    """All columns that any row has, in the order they come."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _json(facts: Any) -> bytes:
    return (json.dumps(plain(facts), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
