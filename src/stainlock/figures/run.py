"""Figures made: their setups chosen, their work run, their folders written."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stainlock.errors import FileError
from stainlock.figures import all_figures
from stainlock.figures.figure import Figure, Setup
from stainlock.figures.output import CONFIGURATION, write_figure
from stainlock.figures.plots import check_matplotlib
from stainlock.figures.report import write_report
from stainlock.figures.subject import first_available, in_zoo, resolved
from stainlock.sweeps import run_sweep

ALL = "all"
ZOO = Path(__file__).resolve().parents[3] / "benchmarks"  # of a checkout
Progress = Callable[[int, int], None]


def check_figure(name: str) -> None:
    """One clear line for a name that no figure has, before anything is loaded."""
    known = [*all_figures(), ALL]
    if name not in known:
        close = difflib.get_close_matches(name, known, 3, 0.4)
        advice = f"did you mean {', '.join(close)}?" if close else "`stainlock reproduce --list` has them all"
        raise ValueError(f"expected the name of a figure, got {name!r}: {advice}")


def chosen_setup(figure: Figure, *, quick: bool, zoo: Path | None = None, **given: Any) -> Setup:
    """The figure's own setup, full or quick, with what was given in its place; everything it names can be had."""
    options = given.pop("options", {})
    own = {name: value for name, value in given.items() if value is not None}
    layers = tuple(own.pop("layers", ()))
    if layers and not figure.needs_layers:
        raise ValueError(f"expected no --layers for {figure.name}, whose place is given")

    def with_given(setup: Setup) -> Setup:
        if "model" in own:  # another model has other layers, and is what it is
            setup = replace(setup, weights=None, layers=(), stands_for="")
        elif "data" in own:
            setup = replace(setup, stands_for=f"{setup.stands_for}, on other data" if setup.stands_for else "")
        mine = {k: v for k, v in options.items() if v is not None}
        kept = {k: v for k, v in setup.options.items() if not (k == "untrained" and "model" in own)}
        return replace(setup, **own, layers=layers or setup.layers, options=kept | mine)

    if quick and zoo is not None and not (zoo / "zoo.py").is_file():
        raise FileError(f"expected a folder with zoo.py, which builds what --quick stands on, got {zoo}")
    if quick:
        zoo = zoo or (ZOO if ZOO.is_dir() else None)
        if own.keys() & {"model", "weights", "data"}:  # what is wrong is then the user's
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
    """Make a figure in its own folder under ``out``, and the report of all that are there; the files written.

    ``given`` are fields of `Setup`, in place of the figure's own. The same call again goes on where it was interrupted.
    """
    check_figure(name)
    check_matplotlib()
    figure, folder = all_figures()[name], Path(out) / name
    setup = chosen_setup(figure, quick=quick, zoo=zoo, **given)
    if tell is not None:
        tell(f"{name}: {setup.stands_for or setup.model}")
    start = time.perf_counter()
    rows = run_sweep(figure.work(setup), folder, workers=workers, ray=ray, progress=progress)
    seconds = time.perf_counter() - start + _seconds_before(folder)
    files = write_figure(folder, figure, setup, figure.draw(rows, setup), quick=quick, seconds=seconds)
    return [*files, write_report(Path(out))]


def _seconds_before(folder: Path) -> float:
    """What an earlier run of the same figure took, whose rows were there already."""
    try:
        return float(json.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
