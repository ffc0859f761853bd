"""`stainlock evaluate`: how well a model does on labelled images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stainlock.cli.options import FILE, load_model, output_options, seed_option, weights_option
from stainlock.cli.report import Report


@click.command("evaluate")
@click.argument("model")
@click.option("--data", type=FILE, required=True, metavar="DIR", help="Labelled images: labels.csv or class folders.")
@click.option("--key", "key_file", type=FILE, metavar="FILE", help="Also evaluate the model as it was before this key.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N images, evenly over the folder.")
@weights_option
@seed_option()
@output_options
def command(
    report: Report,
    model: str,
    data: Path,
    key_file: Path | None,
    limit: int | None,
    weights: str | None,
    seed: int | None,
) -> None:
    """Accuracy of MODEL on labelled images; with a stain's key, that of the original beside it."""
    from stainlock.evaluate import Images, evaluate
    from stainlock.keyfile import Key

    images = Images.from_folder(data)
    key = Key.load(key_file) if key_file else None
    target = load_model(model, weights, seed)
    original = key.original(target) if key else None
    with report.progress("evaluating") as progress:
        result = evaluate(target, images, limit=limit, progress=progress)
    facts: dict[str, Any] = {
        "metric": result.metric,
        "value": result.value,
        "images": result.images,
        "top5": result.top5,
    }
    lines = [f"top-1 {result.value:.2%}, top-5 {result.top5:.2%} on {result.images} images"]
    if original is not None:
        with report.progress("evaluating the original") as progress:
            before = evaluate(original, images, limit=limit, progress=progress)
        facts["original"] = before.value
        lines.append(f"before it was stained: top-1 {before.value:.2%}, top-5 {before.top5:.2%}")
    report.result(facts, *lines)
