"""`stainlock probe`: pictures to send to a suspect behind an API."""

from __future__ import annotations

from pathlib import Path

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, output_options
from stainlock.cli.report import Report


@click.command("probe", cls=Verb)
@click.option(
    "--key",
    "key_file",
    type=FILE,
    required=True,
    metavar="FILE",
    help="The owner's key, made with `stain --schema output`.",
)
@click.option("--out", type=FILE, required=True, metavar="DIR", help="Folder for the pictures and the manifest.")
@click.option("--data", type=FILE, metavar="DIR", help="Natural images to use as decoys. Without it, decoys are"
              " synthetic: noise with the spectrum of photographs, and triggers with shuffled tiles.")  # fmt: skip
@click.option("--decoys", type=click.IntRange(min=0), metavar="N", help="Number of decoys.  [default: as many as"
              " triggers]")  # fmt: skip
@click.option("--canvas", nargs=2, type=click.IntRange(min=1), metavar="H W", help="Centre each picture on a grey"
              " canvas of this size, for services that resize to it and crop the centre.")  # fmt: skip
@output_options
def command(
    report: Report, key_file: Path, out: Path, data: Path | None, decoys: int | None, canvas: tuple[int, int] | None
) -> None:
    """Write the pictures for a black-box verification.

    They are triggers, look-alikes of each, and decoys. Send everything in DIR/pictures to the suspect, in any order,
    write its answers into DIR/answers.csv, and run `stainlock verify --answers`. The pictures' names reveal nothing;
    DIR/manifest.json does, so keep it to yourself.
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
        f"send only the pictures; {MANIFEST} says which is which: keep it secret",
        f"then: stainlock verify --answers {out / ANSWERS} --key {key_file}",
    )
    if images is None and made.decoys:
        report.remark("the decoys are synthetic; --data DIR uses natural images instead")
