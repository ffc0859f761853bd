"""A figure's folder: its plots, the numbers behind them, and the settings that produced them."""

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
from stainlock.figures.comparison import comparison
from stainlock.figures.figure import Drawn, Figure, Setup
from stainlock.figures.plots import rendered
from stainlock.figures.report import RECORD
from stainlock.storage.durable import write_file
from stainlock.sweeps.journal import plain

CONFIGURATION = "configuration.json"
_PACKAGES = ("torch", "torchvision", "timm", "diffusers", "numpy", "scipy", "matplotlib", "pycocotools", "torchmetrics")


def write_figure(
    folder: Path, figure: Figure, setup: Setup, drawn: Drawn, *, quick: bool, seconds: float
) -> list[Path]:
    """Plots as PNG and SVG, tables as CSV, the configuration, and the record that the report is built from."""
    files = {f"{plot.name}.{kind}": rendered(plot.picture, kind) for plot in drawn.plots for kind in ("png", "svg")}
    compared = comparison(figure, setup, drawn)
    tables = [*([compared] if compared else []), *drawn.tables]
    files |= {f"{table.name}.csv": csv_bytes(table.rows) for table in tables}
    configuration = {"figure": figure.name, "quick": quick, "setup": setup.facts(), "seconds": round(seconds, 1)}
    files[CONFIGURATION] = _json(configuration | {"versions": versions()})
    record = {
        "figure": figure.name, "group": figure.group, "title": figure.titled(setup.model_name), "shows": figure.shows,
        "paper": {"model": figure.paper.model, "figure": figure.paper.figure}, "model": setup.model_name,
        "ran_on": setup.stands_for or _ran_on(setup), "quick": quick, "seconds": seconds,
        "layers": list(setup.layers), "detectors": setup.detectors, "images": setup.images,
        "findings": drawn.findings,
        "plots": [{"file": f"{p.name}.png", "caption": p.caption, "photographic": p.photographic} for p in drawn.plots],
        "tables": [
            {"file": f"{t.name}.csv", "caption": t.caption, "shown": list(t.shown),
             "rows": [{c: row.get(c) for c in t.shown} for row in t.rows] if t.shown else []}
            for t in tables
        ],
    }  # fmt: skip
    files[RECORD] = _json(record)
    for name, content in files.items():
        write_file(folder / name, content)
    return [folder / name for name in files]


def _ran_on(setup: Setup) -> str:
    return f"{setup.model}, on {setup.data}" if setup.data else setup.model


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    found = {"stainlock": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def csv_bytes(rows: Sequence[dict[str, Any]]) -> bytes:
    """A CSV file with every column of any row, in order of first appearance."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _json(facts: Any) -> bytes:
    return (json.dumps(plain(facts), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
