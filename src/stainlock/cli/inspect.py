"""`stainlock inspect`: which layers of a model can carry a stain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.options import load_model, output_options, seed_option, weights_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.sites import Analysis, Site


@click.command("inspect")
@click.argument("model")
@weights_option
@seed_option()
@output_options
def command(report: Report, model: str, weights: str | None, seed: int | None) -> None:
    """List the layers of MODEL that can carry a stain, and the one `stain` would choose."""
    from stainlock.sites import analyse

    analysis = analyse(load_model(model, weights, seed))
    recommended = _recommended(analysis)
    sites = sorted(analysis.sites.values(), key=lambda s: (s.problem is not None, s.additive_problem is not None))
    facts = {"model": model, "recommended": recommended, "sites": [_facts(s, s.name == recommended) for s in sites]}
    report.result(facts, _table(sites, recommended))
    if recommended is None:
        report.remark("No layer of this model can carry a detector that stays silent.")
    else:
        report.remark(f"Recommended: {recommended}, which `stainlock stain` takes when no --site is given.")


def _recommended(analysis: Analysis) -> str | None:
    from stainlock.errors import SiteError
    from stainlock.stain.choose import choose_site

    try:
        return choose_site(analysis, additive=False).name
    except SiteError:
        return None


def _facts(site: Site, recommended: bool) -> dict[str, Any]:
    return {
        "site": site.name,
        "kind": site.kind,
        "dimension": site.dimension,
        "channels": site.channels,
        "activation": site.activation.name if site.activation else None,
        "patch": list(site.patch),
        "locks": [],
        "usable": site.problem is None,
        "problem": site.problem,
        "additive_problem": site.additive_problem,
        "norm": site.norm,
        "positions": list(site.grid),
        "recommended": recommended,
    }


def _table(sites: list[Site], recommended: str | None) -> Table:
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
            "×".join(map(str, site.patch)),
            "×".join(map(str, site.grid)) or "1",
            stain,
        )
    return table
