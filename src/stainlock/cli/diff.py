"""`stainlock diff`: what changed between two models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, code_options, load_models, output_options, seed_option, weights_option
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report, printable

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.plan import Change

_SHOWN = 8


@click.command("diff", cls=Verb)
@click.argument("base")
@click.argument("model")
@click.option("--out", type=FILE, metavar="DELTA", help="Also write the changes to a file for `stainlock apply`.")
@code_options
@weights_option
@click.option(
    "--model-weights",
    metavar="FILE|pretrained|random",
    help="Weights of MODEL, given like --weights, which is for BASE.",
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
    """List what changed from BASE to MODEL, parameter by parameter."""
    from stainlock.plan import changes, diff
    from stainlock.storage.onnx_files import is_onnx

    if is_onnx(base) and is_onnx(model) and out is None:
        _report_files(report, base, model, weights or model_weights, code)
        return
    with Outputs([out] if out else []) as outputs:
        before, after = load_models([base, model], [weights, model_weights], seed, code)
        plan = diff(before, after)
        found = changes(plan, before)
        if out:
            plan.save(outputs.place(out))
            outputs.commit()
    facts = {"changes": [dataclasses.asdict(change) for change in found], "elements": plan.elements}
    report.result(facts, _table(found) if found else "nothing was changed")
    if out:
        report.remark(f"changes: {out}")


def _report_files(report: Report, base: str, model: str, weights: str | None, code: Code) -> None:
    """Compare two ONNX files tensor by tensor. No model is built, so any two can be compared."""
    from stainlock.exports.onnx_changes import onnx_changes

    if weights is not None or code.given:
        raise ValueError("ONNX files hold their own weights and operations: leave out --weights, --model and the like")
    found = onnx_changes(base, model)
    facts: dict[str, Any] = {
        "changes": [dataclasses.asdict(change) for change in found.changes],
        "elements": sum(change.elements for change in found.changes),
        "added": found.added, "removed": found.removed,
        "operations": {"added": found.operations_added, "removed": found.operations_removed},
    }  # fmt: skip
    lines: list[Any] = [_table(found.changes)] if found.changes else []
    for what, names in (("new", found.added), ("gone", found.removed)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{what} tensors: {', '.join(names[:_SHOWN])}{more}")
    for what, counts in (("new", found.operations_added), ("gone", found.operations_removed)):
        if counts:
            lines.append(f"{what} operations: {', '.join(f'{n} {name}' for name, n in sorted(counts.items()))}")
    report.result(facts, *(lines or ["nothing was changed"]))


def _table(found: Sequence[Change]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("parameter", overflow="fold")
    table.add_column("elements", justify="right")
    table.add_column("largest change", justify="right")
    for change in found:
        table.add_row(printable(change.parameter), str(change.elements), f"{change.max_abs:.3g}")
    return table
