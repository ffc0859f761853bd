"""`stainlock apply`: rebuild a protected model from its base and a delta."""

from __future__ import annotations

from pathlib import Path

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import (
    FILE,
    Code,
    check_out,
    code_options,
    load_model,
    output_options,
    seed_option,
    weights_option,
)
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report


@click.command("apply", cls=Verb)
@click.argument("base")
@click.argument("delta", type=FILE)
@click.option(
    "--out",
    type=FILE,
    required=True,
    metavar="DIR",
    help="Where to write the model, as a bundle; FILE.onnx if BASE is an ONNX file.",
)
@code_options
@weights_option
@seed_option()
@output_options
def command(
    report: Report, base: str, delta: Path, out: Path, weights: str | None, seed: int | None, code: Code
) -> None:
    """Rebuild a model from BASE and DELTA.

    DELTA is a file written by `stain --delta`, `lock --delta`, `clients issue --delta` or `diff --out`.
    """
    from stainlock.plan import Plan, apply

    check_out(base, out)
    with Outputs([out]) as outputs:
        plan = Plan.load(delta)
        target = load_model(base, weights, seed, code)
        outputs.model(out, apply(target, plan))
        outputs.commit()
    changed = plan.changed(target)
    report.result({"out": str(out), "parameters_changed": changed}, f"{changed} parameters changed")
    report.remark(f"model: {out}")
