"""Create a figure: choose the setup, run the work, write the folder and the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stainlock.errors import FileError, meant
from stainlock.figures import all_figures
from stainlock.figures.figure import Figure, Setup
from stainlock.figures.output import CONFIGURATION, write_figure
from stainlock.figures.plots import check_matplotlib
from stainlock.figures.report import write_report
from stainlock.figures.subject import first_available, in_zoo, resolved
from stainlock.storage.records import read_json
from stainlock.storage.values import check_number
from stainlock.sweeps import run_sweep

ALL = "all"
ZOO = Path(__file__).resolve().parents[3] / "benchmarks"  # in a checkout
Progress = Callable[[int, int], None]


def check_figure(name: str) -> None:
    """Raise ValueError for an unknown figure name, before anything is loaded."""
    known = [*all_figures(), ALL]
    if name not in known:
        advice = meant(name, known) or "`stainlock reproduce --list` shows them all"
        raise ValueError(f"expected the name of a figure, got {name!r}: {advice}")


def chosen_setup(figure: Figure, *, quick: bool, zoo: Path | None = None, **given: Any) -> Setup:
    """The figure's full or quick setup, with its values replaced by those ``given``, checked and resolved."""
    options = given.pop("options", {})
    own = {name: value for name, value in given.items() if value is not None}
    layers = tuple(own.pop("layers", ()))
    if layers and not figure.needs_layers:
        raise ValueError(f"expected no --layers for {figure.name}: its lock has a fixed place")

    def with_given(setup: Setup) -> Setup:
        if "model" in own:  # the descriptions and layers are those of the figure's own model
            setup = replace(setup, weights=None, layers=(), name="", stands_for="", classes="")
        elif "data" in own:
            setup = replace(setup, stands_for=f"{setup.stands_for}, on other data" if setup.stands_for else "")
        mine = {k: v for k, v in options.items() if v is not None}
        kept = {k: v for k, v in setup.options.items() if not (k == "untrained" and "model" in own)}
        return replace(setup, **own, layers=layers or setup.layers, options=kept | mine)

    if quick and zoo is not None and not (zoo / "zoo.py").is_file():
        raise FileError(f"expected a folder with zoo.py, which builds the models of --quick, got {zoo}")
    if quick:
        zoo = zoo or (ZOO if ZOO.is_dir() else None)
        if own.keys() & {
            "model",
            "weights",
            "data",
        }:  # no fallback to other stand-ins: errors must concern what the user gave
            return resolved(in_zoo(with_given(figure.quick[0]), zoo), figure)
        return first_available([with_given(s) for s in figure.quick], figure, zoo)
    setup = with_given(figure.full)
    if not setup.model or (figure.data and setup.data is None):
        lacking = "--model" if not setup.model else "--data DIR"
        raise ValueError(f"expected {lacking}, or --quick: {figure.name} needs {figure.needs}")
    return resolved(setup, figure)


def reproduce(
    name: str,
    out: str | Path,
    *,
    quick: bool = False,
    zoo: Path | None = None,
    workers: int = 1,
    ray: str | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
    **given: Any,
) -> list[Path]:
    """Create a figure in its folder under ``out``, update the report, and return the files written.

    ``given`` are fields of `Setup` that replace the figure's own. After an interrupt, the same call resumes the work.

    >>> files = sl.reproduce(
    ...     "stain-resnet50", "figures", model="torchvision:squeezenet1_1?num_classes=10", weights="random",
    ...     data="photographs", layers=("features.3.squeeze",), detectors=1,
    ... )
    >>> files[-1].name
    'report.html'
    """
    check_figure(name)
    check_matplotlib()
    figure, folder = all_figures()[name], Path(out) / name
    setup = chosen_setup(figure, quick=quick, zoo=zoo, **given)
    if tell is not None:
        tell(f"{name}: {setup.stands_for or setup.model_name}")
    start = time.perf_counter()
    rows = run_sweep(figure.work(setup), folder, workers=workers, ray=ray, progress=progress)
    seconds = time.perf_counter() - start + _seconds_before(folder)
    files = write_figure(folder, figure, setup, figure.draw(rows, setup), quick=quick, seconds=seconds)
    return [*files, write_report(Path(out))]


def _seconds_before(folder: Path) -> float:
    """The time taken by an earlier run of the same figure, whose rows are reused; 0 if there is none."""
    try:
        seconds = read_json(folder / CONFIGURATION, "figure's configuration")["seconds"]
        check_number(seconds, "seconds")
        return float(seconds)
    except (FileError, ValueError, KeyError, TypeError, IndexError):
        return 0.0
