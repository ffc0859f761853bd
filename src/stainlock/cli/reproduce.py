"""`stainlock reproduce`: the paper's figures, or the same figures for your own model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, output_options, seed_option, weights_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.figures import Figure


@click.command("reproduce", cls=Verb)
@click.argument("figure", required=False)
@click.option("--list", "listed", is_flag=True, help="List the figures with what they need and cost, and exit.")
@click.option("--quick", is_flag=True, help="Use small models instead of the paper's: minutes on two cores.")
@click.option("--out", type=FILE, default=Path("reproduction"), show_default=True, metavar="DIR",
              help="Output: a folder for each figure, and report.html. After an interrupt, the same command"
              " resumes.")  # fmt: skip
@click.option("--model", metavar="MODEL", help="Model to use instead of the paper's.")
@weights_option
@click.option("--data", metavar="DIR", help="Data that the figure needs: ImageNet's validation set, COCO, or your own.")
@click.option("--layers", metavar="A,B,...", help="Layers to use.  [default: evenly spaced]")
@click.option(
    "--detectors", type=click.IntRange(min=1), metavar="N", help="Detectors in each layer.  [default: as in the paper]"
)
@click.option(
    "--images", type=click.IntRange(min=4), metavar="N", help="Use at most N images, evenly spaced over the data."
)
@click.option("--discriminator", metavar="MODEL", help="For generators: the discriminator whose loss is measured.")
@click.option(
    "--features", metavar="MODEL|inception", help="For generators: feature extractor for the Fréchet distance."
)
@click.option("--feature-weights", type=FILE, metavar="FILE", help="Weights for --features.")
@click.option("--nafnet", type=FILE, metavar="FILE", help="NAFNet weights, for denoising as in the paper.")
@click.option("--ours", is_flag=True, help="Stains: replace the channel with the least effect on later layers, not the"
              " one of least ℓ1 norm as in the paper.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Number of processes on this machine.")  # fmt: skip
@click.option("--ray", metavar="ADDRESS", help="Run on a Ray cluster instead; 'local' starts one on this machine.")
@click.option("--zoo", type=FILE, metavar="DIR", help="Folder with zoo.py, which builds the models of --quick."
              "  [default: a checkout's benchmarks/]")  # fmt: skip
@seed_option("Seed for the detectors, the images sampled for the bounds, and random weights.  [default: 0]")
@output_options
def command(report: Report, figure: str | None, listed: bool, out: Path, **given: Any) -> None:
    """Make a FIGURE of the paper, or `all`.

    Writes plots, the numbers behind them as CSV, and report.html.
    """
    from stainlock.figures.run import ALL, check_figure

    if listed:
        _list(report)
        return
    if figure is None:
        raise ValueError("expected FIGURE, got none: `stainlock reproduce --list` shows them all")
    check_figure(figure)
    options = {name: given.pop(name) for name in ("discriminator", "features", "nafnet")}
    options["feature_weights"] = str(given["feature_weights"]) if given["feature_weights"] else None
    options["nafnet"] = str(options["nafnet"]) if options["nafnet"] else None
    options["ours"] = given.pop("ours") or None
    del given["feature_weights"]
    given["layers"] = tuple(given["layers"].split(",")) if given["layers"] else None
    if figure == ALL:
        _all(report, out, given | {"options": options})
        return
    files = _make(report, figure, out, given | {"options": options})
    report.result({"figure": figure, "files": files}, *files)


def _make(report: Report, name: str, out: Path, given: dict[str, Any]) -> list[str]:
    from stainlock.figures.run import reproduce

    with report.progress(name) as progress:
        found = reproduce(name, out, progress=progress, tell=report.remark, **given)
    return [str(path) for path in found]


def _all(report: Report, out: Path, given: dict[str, Any]) -> None:
    """Make every figure; one that fails is reported and left out."""
    from stainlock.errors import FileError, StainlockError
    from stainlock.figures import all_figures
    from stainlock.figures.run import ALL

    for name in ("model", "weights", "data", "layers"):
        if given[name] is not None:
            raise ValueError(f"expected no --{name} with {ALL}: the figures use different models")
    files: dict[str, list[str]] = {}
    problems: dict[str, str] = {}
    for name in all_figures():
        try:
            files[name] = _make(report, name, out, dict(given))
        except (StainlockError, ValueError) as error:
            problems[name] = " ".join(str(error).split())
            report.remark(f"{name} left out: {problems[name]}")
    if not files:
        raise FileError(f"no figure could be made: {next(iter(problems.values()))}")
    written = sorted({file for own in files.values() for file in own})
    facts = {"figure": ALL, "files": written, "figures": list(files), "left_out": problems}
    report.result(facts, f"{len(files)} figures: {out / 'report.html'}")


def _list(report: Report) -> None:
    from rich import box
    from rich.table import Table

    from stainlock.figures import all_figures

    found = list(all_figures().values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "shows", "needs", "cost"):
        table.add_column(column, overflow="fold")
    for one in found:
        table.add_row(one.name, f"{_title(one)} ({one.paper.figure})", one.needs, one.cost)
    facts = [
        {"figure": one.name, "title": _title(one), "paper": one.paper.figure, "shows": one.shows, "needs": one.needs,
         "cost": one.cost}
        for one in found
    ]  # fmt: skip
    report.result({"figures": facts}, table)


def _title(figure: Figure) -> str:
    return figure.titled(figure.paper.model)
