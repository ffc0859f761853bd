"""`stainlock probe`: pictures to ask a suspect behind an API with."""

from __future__ import annotations

from pathlib import Path

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, output_options
from stainlock.cli.report import Report


@click.command("probe", cls=Verb)
@click.option(
    "--key", "key_file", type=FILE, required=True, metavar="FILE", help="The owner's key, of --schema output."
)
@click.option("--out", type=FILE, required=True, metavar="DIR", help="Where the pictures and the manifest go.")
@click.option("--data", type=FILE, metavar="DIR", help="Natural images to take decoys from. Without, decoys are"
              " synthetic: spectra of photographs, and triggers with their tiles shuffled.")  # fmt: skip
@click.option("--decoys", type=click.IntRange(min=0), metavar="N", help="How many decoys.  [default: as many as"
              " triggers]")  # fmt: skip
@click.option("--canvas", nargs=2, type=click.IntRange(min=1), metavar="H W", help="Put each picture into the middle"
              " of a grey one of this size, for services that resize to it and cut out the middle.")  # fmt: skip
@output_options
def command(
    report: Report, key_file: Path, out: Path, data: Path | None, decoys: int | None, canvas: tuple[int, int] | None
) -> None:
    """Write the pictures that a black-box verification asks: triggers, their look-alikes, and decoys among them.

    Send everything in DIR/pictures to the suspect, in any order, write what it answers into DIR/answers.csv, and run
    `stainlock verify --answers`. The names of the pictures tell nothing; DIR/manifest.json does, and stays with you.
    """
    from stainlock.evaluation import Images
    from stainlock.key import Key
    from stainlock.services.probing import ANSWERS, IMAGES, MANIFEST, check_pictures, probe

    key = Key.load(key_file)
    check_pictures(key)
    images = Images.from_folder(data) if data else None
    made = probe(key, out, decoys=decoys, data=images, canvas=canvas)
    facts = {
        "written": [str(out / IMAGES / name) for name in made.files], "triggers": made.triggers,
        "look_alikes": made.look_alikes, "decoys": made.decoys, "answers": str(out / ANSWERS),
        "manifest": str(out / MANIFEST),
    }  # fmt: skip
    report.result(facts, f"wrote {len(made.files)} pictures to {out / IMAGES}: {made.triggers} triggers,"
                  f" {made.look_alikes} look-alikes, {made.decoys} decoys")  # fmt: skip
    report.remark(
        f"send the pictures alone; {MANIFEST} says which is which, and is secret",
        f"then: stainlock verify --answers {out / ANSWERS} --key {key_file}",
    )
    if images is None and made.decoys:
        report.remark("the decoys are synthetic; --data DIR takes natural images instead")
