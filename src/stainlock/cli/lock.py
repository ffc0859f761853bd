"""`stainlock lock`: a locked copy of a model, and the key that unlocks it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from stainlock.cli.options import FILE, load_model, output_options, seed_option, weights_option
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report


@click.command("lock")
@click.argument("model")
@click.option("--out", type=FILE, required=True, metavar="DIR", help="Where the locked model goes, as a bundle.")
@click.option("--key", "key_file", type=FILE, required=True, metavar="FILE", help="Where the secret key goes.")
@click.option("--kind", type=click.Choice(["internal"]), default="internal", show_default=True, help="Which lock.")
@click.option("--site", metavar="S", help="The layer of the detector; a good one is chosen when not given.")
@click.option("--steps", type=click.IntRange(min=2), default=60, show_default=True, help="Steps of the trigger search.")
@click.option("--tries", type=click.IntRange(min=1), default=8, show_default=True, help="Detectors to pick from.")
@click.option(
    "--trigger", type=FILE, metavar="FILE.png", help="Also write the client's trigger: the patch and nothing more."
)
@click.option("--delta", type=FILE, metavar="FILE", help="Also write the changes alone, for `stainlock apply`.")
@weights_option
@seed_option("Makes the run, its secrets included, repeatable: leave it out for real protection.")
@output_options
def command(
    report: Report,
    model: str,
    out: Path,
    key_file: Path,
    trigger: Path | None,
    delta: Path | None,
    weights: str | None,
    seed: int | None,
    **settings: Any,
) -> None:
    """Write a locked copy of MODEL, and the secret key that unlocks it."""
    from stainlock.files import write_file
    from stainlock.lock import lock
    from stainlock.plan import diff
    from stainlock.report.images import png

    if trigger is not None and trigger.suffix.lower() != ".png":
        raise ValueError(f"expected --trigger FILE.png, since only a PNG keeps every pixel, got {trigger}")
    with Outputs([out, key_file, *([trigger] if trigger else []), *([delta] if delta else [])]) as outputs:
        base = load_model(model, weights, seed)
        if trigger and base.input_shape[0] not in (1, 3):
            raise ValueError(f"expected a model of images for --trigger, got inputs of shape {base.input_shape}")
        start = time.perf_counter()
        with report.progress("looking for the trigger") as progress:
            locked, key = lock(base, seed=seed, progress=progress, **settings)
        seconds = time.perf_counter() - start
        outputs.bundle(out, locked)
        key.save(outputs.place(key_file))
        patch = key.detectors[0].trigger
        if trigger:
            write_file(outputs.place(trigger), png(patch.levels), secret=True)
        if delta:
            diff(base, locked).save(outputs.place(delta))
        outputs.commit()
    height, width = patch.region.size
    margin = key.trigger_response / max(key.natural_level, 1e-12)
    facts = {
        "kind": settings["kind"],
        "site": key.site,
        "dimension": key.dimension,
        "patch": [height, width],
        "trigger_response": key.trigger_response,
        "natural_threshold": key.natural_threshold,
        "natural_level": key.natural_level,
        "parameters_changed": key.revert.elements,
        "layers": key.details["layers"],
        "seconds": round(seconds, 3),
        "out": str(out),
        "key": str(key_file),
    }
    report.result(
        facts,
        f"locked: detector in {key.site}, patch {height}×{width}, {facts['parameters_changed']} parameters changed",
    )
    report.remark(
        f"the patch's response is {margin:.1f} times that of plain inputs",
        f"model: {out}",
        f"key:   {key_file} (secret: it unlocks the model, and removes the lock)",
    )
    if trigger:
        report.remark(f"trigger: {trigger} (for the client: it unlocks the model, and no more)")
