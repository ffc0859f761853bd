"""`stainlock export`: write a model in another format, and compare its outputs with the model's."""

from __future__ import annotations

from pathlib import Path

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, code_options, load_model, output_options, seed_option, weights_option
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report


@click.command("export", cls=Verb)
@click.argument("model")
@click.option("--out", type=FILE, required=True, metavar="FILE", help="File to write: .safetensors, .onnx or .pt2.")
@click.option("--format", type=click.Choice(["safetensors", "onnx", "torch-export"]), help="File format.  [default:"
              " from the suffix of --out]")  # fmt: skip
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
    """Write MODEL as weights, ONNX or a torch.export program.

    The file's outputs are compared with the model's, and a file that computes something else is not kept. ONNX files
    and torch.export programs contain a lock's gates; weights alone do not. The file holds no trace of your machine.
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
        report.remark("it takes one image at a time: the model's code fixes the batch size")
    if kind == "safetensors" and Structure.of(target) is not None:
        report.remark("note: weights alone do not contain the lock's gates: a client needs --format onnx or"
                      " torch-export, or a kit (`stainlock lock --client DIR`)")  # fmt: skip
