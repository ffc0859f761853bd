"""`stainlock inspect`: which layers of a model can carry a stain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.options import FILE, load_model, output_options, seed_option, weights_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.certificates.suitability import Suitability
    from stainlock.network.network import Network
    from stainlock.network.sites import Site


@click.command("inspect")
@click.argument("model")
@click.option("--suitability", is_flag=True, help="Also measure at every usable site how far a trigger stands out.")
@click.option("--data", type=FILE, metavar="DIR", help="Natural images for --suitability, instead of synthetic inputs.")
@click.option("--limit", type=click.IntRange(min=2), default=64, show_default=True, metavar="N",
              help="At most N images of --data.")  # fmt: skip
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
) -> None:
    """List the layers of MODEL that can carry a stain, and the one `stain` would choose."""
    from stainlock.network.network import analyse

    if data is not None and not suitability:
        raise ValueError("expected --suitability with --data")
    network = analyse(load_model(model, weights, seed))
    recommended = _recommended(network)
    lockable = _lockable(network)
    sites = sorted(network.sites.values(), key=lambda s: (s.problem is not None, s.additive_problem is not None))
    facts: dict[str, Any] = {
        "model": model,
        "recommended": recommended,
        "sites": [_facts(s, s.name == recommended, lockable.get(s.name, [])) for s in sites],
    }
    if suitability:
        _report_suitability(report, network, facts, data, limit)
        return
    report.result(facts, _table(sites, recommended))
    if recommended is None:
        report.remark("No layer of this model can carry a detector that stays silent.")
    else:
        report.remark(f"Recommended: {recommended}, which `stainlock stain` takes when no --site is given.")


def _report_suitability(report: Report, network: Network, facts: dict[str, Any], data: Path | None, limit: int) -> None:
    from stainlock.certificates.suitability import recommend, suitability
    from stainlock.evaluation import Images

    images = Images.from_folder(data) if data else None
    batches = None if images is None else (pixels for pixels, _ in images.batches(network.target, 16, limit))
    with report.progress("triggers") as progress:
        found = suitability(network, batches, progress=progress)
    measured = {s.site: dataclasses.asdict(s) for s in found}
    facts["sites"] = [entry | measured.get(entry["site"], {}) for entry in facts["sites"]]
    facts["recommendation"] = recommend(network, found)
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


def _recommended(network: Network) -> str | None:
    from stainlock.errors import SiteError
    from stainlock.stains.site_choice import choose_site

    try:
        return choose_site(network, additive=False).name
    except SiteError:
        return None


def _lockable(network: Network) -> dict[str, list[str]]:
    """For every site, the kinds of lock whose signal finds a way from there."""
    from stainlock.errors import StainlockError
    from stainlock.locks.parts.placement import place_gates
    from stainlock.locks.parts.site_choice import lock_sites

    found: dict[str, list[str]] = {}
    try:
        network.part  # noqa: B018 (it must trace whole)
    except StainlockError:
        return found
    for kind, gates, to_logits in (("internal", 0, True), ("squeeze-excite", 1, False)):
        place = partial(place_gates, network, count=gates, existing=None, to_logits=to_logits)
        for site in lock_sites(network, place, smooth=not to_logits):
            found.setdefault(site.name, []).append(kind)
    return found


def _facts(site: Site, recommended: bool, locks: list[str]) -> dict[str, Any]:
    return {
        "site": site.name,
        "kind": site.kind,
        "dimension": site.dimension,
        "channels": site.channels,
        "activation": site.activation.name if site.activation else None,
        "patch": list(site.patch),
        "locks": locks,
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
