"""`stainlock demo`: the whole story on a real model, with a report to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stainlock.cli.options import FILE, output_options, seed_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.demo import Demonstration


@click.command("demo")
@click.option("--out", type=FILE, default=Path("demo-output"), show_default=True, metavar="DIR", help="Where to write.")
@seed_option("Makes the run repeatable, secrets included.")
@output_options
def command(report: Report, out: Path, seed: int | None) -> None:
    """Stain and verify a real ImageNet model, and write a report to open in a browser."""
    from stainlock.demo import run_demo
    from stainlock.demo.run import REPORT

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
    }
    report.result(facts, _table(demo), f"report: {out / REPORT}")


def _table(demo: Demonstration) -> Table:
    from rich import box
    from rich.table import Table

    from stainlock.cli.verify import chance

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("model", "verdict"):
        table.add_column(heading)
    for heading in ("p-value", "top-1"):
        table.add_column(heading, justify="right")
    for check in demo.checks:
        verdict = "stained" if check.verdict.stained else "not stained"
        table.add_row(check.model, verdict, chance(check.verdict), f"{check.top1:.0%}")
    return table
