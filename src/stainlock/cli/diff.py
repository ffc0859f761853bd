"""`stainlock diff`: what was changed in a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, code_options, load_models, output_options, seed_option, weights_option
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report


@click.command("diff", cls=Verb)
@click.argument("base")
@click.argument("model")
@click.option("--out", type=FILE, metavar="DELTA", help="Also write the changes as a file for `stainlock apply`.")
@code_options
@weights_option
@click.option(
    "--model-weights", metavar="FILE|pretrained|random", help="Weights of MODEL; --weights are those of BASE."
)
@seed_option()
@output_options
def command(
    report: Report,
    base: str,
    model: str,
    out: Path | None,
    weights: str | None,
    model_weights: str | None,
    seed: int | None,
    code: Code,
) -> None:
    """What was changed from BASE to MODEL, parameter by parameter."""
    from rich import box
    from rich.table import Table

    from stainlock.plan import changes, diff

    with Outputs([out] if out else []) as outputs:
        before, after = load_models([base, model], [weights, model_weights], seed, code)
        plan = diff(before, after)
        found = changes(plan, before)
        if out:
            plan.save(outputs.place(out))
            outputs.commit()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("parameter", overflow="fold")
    table.add_column("elements", justify="right")
    table.add_column("largest change", justify="right")
    for change in found:
        table.add_row(change.parameter, str(change.elements), f"{change.max_abs:.3g}")
    facts = {"changes": [dataclasses.asdict(change) for change in found], "elements": plan.elements}
    report.result(facts, table if found else "nothing was changed")
    if out:
        report.remark(f"changes: {out}")
