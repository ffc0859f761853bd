"""`stainlock inspect`: which layers of a model can carry a stain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, code_options, load_model, output_options, seed_option, weights_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.network.network import Network, Site
    from stainlock.stains.suitability import Suitability


@click.command("inspect", cls=Verb)
@click.argument("model")
@click.option("--suitability", is_flag=True, help="Also measure how far a trigger stands out, at every usable site.")
@click.option("--data", type=FILE, metavar="DIR", help="Natural images for --suitability, instead of synthetic inputs.")
@click.option("--limit", type=click.IntRange(min=2), default=64, show_default=True, metavar="N",
              help="Use at most N images of --data.")  # fmt: skip
@code_options
@weights_option
@seed_option()
@output_options
def command(
    report: Report,
    model: str,
    suitability: bool,
    data: Path | None,
    limit: int,
    weights: str | None,
    seed: int | None,
    code: Code,
) -> None:
    """List the layers of MODEL that can carry a stain.

    The one that `stain` would choose is marked with *.
    """
    from stainlock.inspection import inspect

    if data is not None and not suitability:
        raise ValueError("expected --suitability with --data")
    found = inspect(load_model(model, weights, seed, code))
    recommended = found.recommended
    facts: dict[str, Any] = {
        "model": model,
        "recommended": recommended,
        "sites": [_facts(s, s.name == recommended, found.locks[s.name]) for s in found.sites],
    }
    if suitability:
        _report_suitability(report, found.network, facts, data, limit)
        return
    report.result(facts, _table(found.sites, recommended))
    if recommended is None:
        report.remark("No layer of this model can carry a detector that stays silent.")
    else:
        report.remark(f"Recommended: {recommended}, which `stainlock stain` uses if --site is not given.")


def _report_suitability(report: Report, network: Network, facts: dict[str, Any], data: Path | None, limit: int) -> None:
    from stainlock.evaluation import Images
    from stainlock.stains.suitability import recommend, suitability

    images = Images.from_folder(data) if data else None
    batches = (
        None if images is None else (pixels for pixels, _ in images.batches(network.target, batch_size=16, limit=limit))
    )
    with report.progress("triggers") as progress:
        found = suitability(network, batches, progress=progress)
    measured = {s.site: dataclasses.asdict(s) for s in found}
    facts["sites"] = [entry | measured.get(entry["site"], {}) for entry in facts["sites"]]
    facts["recommendation"] = recommend(network, found, facts["recommended"])
    report.result(facts, _suitability_table(found), facts["recommendation"])
    report.remark(f"Natural features are from {', '.join(sorted({s.source for s in found}))}; bounds are estimates.")


def _suitability_table(found: Sequence[Suitability]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("site", overflow="fold")
    for heading in ("dimension", "PCA dimension", "trigger/natural", "theorem1", "cantelli", "cap"):
        table.add_column(heading, justify="right")
    for s in sorted(found, key=lambda s: -s.margin):
        chances = [f"{s.bounds[name]:.2g}" for name in ("theorem1", "cantelli")]
        cap = "0" if s.log10_cap is None else f"1e{s.log10_cap:.0f}"
        table.add_row(s.site, str(s.dimension), f"{s.pca_dimension:.1f}", f"{s.margin:.1f}", *chances, cap)
    return table


def _facts(site: Site, recommended: bool, locks: Sequence[str]) -> dict[str, Any]:
    return {
        "site": site.name,
        "kind": site.kind,
        "dimension": site.dimension,
        "channels": site.channels,
        "activation": site.activation.name if site.activation else None,
        "patch": list(site.searched),
        "locks": list(locks),
        "usable": site.problem is None,
        "problem": site.problem,
        "additive_problem": site.additive_problem,
        "norm": site.norm,
        "positions": list(site.grid),
        "recommended": recommended,
    }


def _table(sites: Sequence[Site], recommended: str | None) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "site", "kind", "dimension", "channels", "activation", "patch", "positions", "stain"):
        numeric = heading in ("dimension", "channels", "patch", "positions")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for site in sites:
        if site.problem is None:
            stain = "yes"
        else:
            stain = f"{'additive only' if site.additive_problem is None else 'no'}: {site.problem}"
        table.add_row(
            "*" if site.name == recommended else "",
            site.name,
            site.kind,
            str(site.dimension),
            str(site.channels),
            site.activation.name if site.activation else "none",
            "×".join(map(str, site.searched)),
            "×".join(map(str, site.grid)) or "1",
            stain,
        )
    return table
