"""`stainlock attack --members`: whom a trace names when clients combine their copies, as a table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.options import Verb
from stainlock.cli.report import Report, rounded

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.attacks.coalitions import CoalitionRow
    from stainlock.target import Target


def coalition_options(verb: Verb) -> Verb:
    """Options of `attack` for coalitions of clients."""
    for option in reversed((
        click.option("--members", type=click.IntRange(min=1), multiple=True, metavar="K", help="Instead of --key: K"
                     " clients combine their copies of MODEL; repeat for several K. --attack names the collusion."),
        click.option("--then", multiple=True, metavar="NAME[=S]", help="With --members: then attack the combined"
                     " file, at strength S or the attack's middle one; repeat for several."),
        click.option("--clients", type=click.IntRange(min=1), metavar="N", help="With --members: total number of"
                     " clients.  [default: 1000]"),
        click.option("--amplitude", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="With --members:"
                     " size of the fingerprints relative to the weights.  [default: 0.01]"),
        click.option("--chips", type=int, help="With --members: length of the fingerprints' codes, a multiple"
                     " of 1024.  [default: 16384]"),
    )):  # fmt: skip
        verb = option(verb)
    return verb


def attack_members(
    report: Report,
    target: Target,
    data: Path | None,
    names: tuple[str, ...],
    then: tuple[str, ...],
    seed: int,
    limit: int,
    **options: Any,
) -> None:
    from stainlock.attacks.coalitions import attack_coalitions
    from stainlock.evaluation import Images

    def finished(row: CoalitionRow) -> None:
        report.remark("  ".join(part for part in _cells(row) if part))

    images = Images.from_folder(data) if data is not None else None
    given = {name: value for name, value in options.items() if value is not None}
    with report.progress("attacking") as progress:
        rows = attack_coalitions(
            target, names or None, then=[_then(text) for text in then], data=images, limit=limit, seed=seed,
            progress=progress, finished=finished, **given,
        )  # fmt: skip
    report.result({"rows": [dataclasses.asdict(row) for row in rows]}, _table(rows))


def _then(text: str) -> tuple[str, float | str]:
    """Parse NAME=S, or NAME for the attack's middle strength."""
    from stainlock.attacks import all_attacks
    from stainlock.attacks.run import check_names

    name, equals, strength = text.partition("=")
    check_names([name])
    strengths = all_attacks()[name].strengths
    if not equals:
        return name, strengths[len(strengths) // 2]
    try:
        return name, float(strength)
    except ValueError:
        return name, strength


def _cells(row: CoalitionRow) -> list[str]:
    done = f"{row.attack} of {row.strength}", row.then
    if not row.applied:
        return [*done, "not applicable", "", "", "", row.note]
    innocents = f", {row.innocents} innocent" if row.innocents else ""
    return [
        *done, row.verdict, f"{row.named} named{innocents}",
        rounded(row.p_value, row.log10_p_value), f"{row.z_least:.1f} to {row.z_most:.1f}",
        "" if row.performance is None else f"{row.performance:.1%}",
    ]  # fmt: skip


def _table(rows: list[CoalitionRow]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("collusion", "then", "verdict", "members", "p at most", "|z| of members", "performance"):
        table.add_column(column)
    for row in rows:
        table.add_row(*_cells(row))
    return table
