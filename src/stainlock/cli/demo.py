"""`stainlock demo`: stain, verify and lock a real model, and write a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, output_options, seed_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.demo import Demonstration


@click.command("demo", cls=Verb)
@click.option(
    "--out", type=FILE, default=Path("demo-output"), show_default=True, metavar="DIR", help="Folder to write to."
)
@seed_option("Make the run repeatable, including its secrets.")
@output_options
def command(report: Report, out: Path, seed: int | None) -> None:
    """Stain, verify and lock a real ImageNet model.

    Writes the models, their keys and report.html, to open in a browser.
    """
    from stainlock.demo import run_demo
    from stainlock.demo.findings import REPORT
    from stainlock.facts import KeyedFacts

    demo = run_demo(out, seed=seed, tell=report.remark)
    facts = {
        "report": str(out / REPORT),
        "site": demo.key.site,
        "dimension": demo.key.dimension,
        "trigger_response": demo.key.trigger_response,
        "largest_natural": float(demo.natural_responses.max()),
        "parameters_changed": demo.key.revert.elements,
        "seconds": round(demo.seconds, 3),
        "checks": [
            {
                "model": check.model,
                "verdict": "stained" if check.verdict.stained else "not stained",
                "p_value": check.verdict.p_value,
                "log10_p_value": check.verdict.log10_p_value,
                "top1": check.top1,
            }
            for check in demo.checks
        ],
        "lock": {
            "bits": demo.locking.key.dimension,
            "gates": len(KeyedFacts.of(demo.locking.key).structure.gates),
            "patch": list(demo.locking.key.detectors[0].trigger.region.size),
            "seconds": round(demo.locking.seconds, 3),
            "top1": demo.locking.top1,
            "difference": demo.locking.difference,
            "photographs": [
                {"class": p.label, "locked": p.locked.name, "unlocked": p.unlocked.name}
                for p in demo.locking.photographs
            ],
        },
    }
    report.result(facts, _table(demo), _lock_table(demo), f"report: {out / REPORT}")


def _lock_table(demo: Demonstration) -> Table:
    from rich import box
    from rich.table import Table

    height, width = demo.locking.key.detectors[0].trigger.region.size
    table = Table("photograph", "locked", f"with the {height}×{width} patch", box=box.SIMPLE_HEAD, pad_edge=False)
    for photo in demo.locking.photographs:
        table.add_row(photo.label, photo.locked.name, photo.unlocked.name)
    without, with_patch = demo.locking.top1["locked, without the patch"], demo.locking.top1["locked, with the patch"]
    table.add_row("all twenty, top-1", f"{without:.0%}", f"{with_patch:.0%}")
    return table


def _table(demo: Demonstration) -> Table:
    from rich import box
    from rich.table import Table

    from stainlock.cli.report import chance

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "verdict"):
        table.add_column(heading)
    for heading in ("p-value", "top-1"):
        table.add_column(heading, justify="right")
    for check in demo.checks:
        verdict = "stained" if check.verdict.stained else "not stained"
        table.add_row(check.model, verdict, chance(check.verdict), f"{check.top1:.0%}")
    return table
