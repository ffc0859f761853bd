"""`stainlock export`: a model in another form, compared with the model on the spot."""

from __future__ import annotations

from pathlib import Path

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, code_options, load_model, output_options, seed_option, weights_option
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report


@click.command("export", cls=Verb)
@click.argument("model")
@click.option("--out", type=FILE, required=True, metavar="FILE", help="Where it goes: .safetensors, .onnx or .pt2.")
@click.option("--format", type=click.Choice(["safetensors", "onnx", "torch-export"]), help="Which form.  [default:"
              " the one that --out ends in]")  # fmt: skip
@code_options
@weights_option
@seed_option()
@output_options
def command(
    report: Report,
    model: str,
    out: Path,
    format: str | None,
    weights: str | None,
    seed: int | None,
    code: Code,
) -> None:
    """Write MODEL as weights, ONNX or a program of torch.export, and compare its outputs with the model's.

    ONNX files and programs hold a lock's gates; weights alone do not. Nothing in the file tells of your machine. A file
    that computes something else is not kept.
    """
    from stainlock.exports.export import format_of, write_as
    from stainlock.gating.structure import Structure

    kind = format_of(out, format)
    with Outputs([out]) as outputs:
        target = load_model(model, weights, seed, code)
        found = write_as(target, outputs.place(out), kind)
        outputs.commit()
    facts = {"out": str(out), "format": kind, "max_difference": found.max_difference, "any_batch": found.any_batch}
    close = f"its outputs differ from the model's by at most {found.max_difference:.2g}"
    report.result(facts, f"wrote {out} ({kind}): {close}")
    if not found.any_batch:
        report.remark("it takes one image at a time: the model's code fixes the size of a batch")
    if kind == "safetensors" and Structure.of(target) is not None:
        report.remark("note: weights alone are without the lock's gates: a client needs --format onnx or torch-export,"
                      " or a kit (`stainlock lock --client DIR`)")  # fmt: skip
