"""`stainlock evaluate`: a model's performance on labelled images, or a generator's on noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, code_options, load_model, output_options, seed_option, weights_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.evaluation import Images
    from stainlock.key import Key
    from stainlock.target import Target


@click.command("evaluate", cls=Verb)
@click.argument("model")
@click.option("--data", type=FILE, metavar="DIR", help="Labelled images: labels.csv or class folders; for an"
              " object detector, a COCO folder.")  # fmt: skip
@click.option(
    "--key", "key_file", type=FILE, metavar="FILE", help="Key of a stain or lock: also evaluate the original."
)
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Use at most N images, evenly spaced.  [default: all]"
)
@click.option("--boxes", type=FILE, metavar="DIR", help="Object detectors only: draw boxes, settings side by side.")
@click.option("--noise", type=click.IntRange(min=2), metavar="N", help="Generators only, instead of --data: use N"
              " noise vectors.")  # fmt: skip
@click.option(
    "--law",
    type=click.Choice(["uniform", "normal"]),
    default="uniform",
    show_default=True,
    help="Distribution of --noise: uniform within the model's bounds, or standard normal. A lock's key has its own.",
)
@click.option(
    "--discriminator",
    metavar="MODEL",
    help="With --noise: print this discriminator's loss on the generated images.",
)
@click.option("--features", metavar="MODEL", help="With --noise: feature extractor for the Fréchet distance to the"
              " images of --data or, without it, to the original's.")  # fmt: skip
@click.option(
    "--grid", type=FILE, metavar="FILE.png", help="With --noise: also write a picture with images of all settings."
)
@code_options
@weights_option
@seed_option("Seed for --noise and for random weights.  [default: 0]")
@output_options
def command(
    report: Report,
    model: str,
    data: Path | None,
    key_file: Path | None,
    limit: int | None,
    boxes: Path | None,
    noise: int | None,
    weights: str | None,
    seed: int | None,
    code: Code,
    **of_generators: Any,
) -> None:
    """Measure the accuracy of MODEL on labelled images.

    With a stain's key the original is measured too; with a lock's key the original, edited and locked model are, each
    without and with the patch.

    Object detectors are measured by average precision and recall on a COCO folder (images/, annotations.json).
    Generators (--noise N) are measured by how far their images are from the original's, and by discriminator loss.
    """
    from stainlock.cli.detection import evaluate_detections
    from stainlock.cli.generator import evaluate_generator
    from stainlock.evaluation import Images, evaluate
    from stainlock.key import Key
    from stainlock.network.object_detectors import is_object_detector

    if noise is not None:
        key = Key.load(key_file) if key_file else None
        target = load_model(model, weights, seed, code)
        evaluate_generator(report, target, key, noise, seed=seed, data=data, **of_generators)
        return
    for name in ("discriminator", "features", "grid"):
        if of_generators[name] is not None:
            raise ValueError(f"expected --noise N with --{name}, which is for generators")
    if data is None:
        raise ValueError("expected --data DIR or, for a generator, --noise N")
    images = Images.from_folder(data)  # fails before a model is loaded
    key = Key.load(key_file) if key_file else None
    target = load_model(model, weights, seed, code)
    if key is not None and key.carrier == "entries":
        raise ValueError("expected --noise N: this key is a generator's, which has no labelled images")
    if target.normalises and is_object_detector(target.model):
        evaluate_detections(report, target, key, data, limit=limit, boxes=boxes)
        return
    if boxes is not None:
        raise ValueError("expected an object detector for --boxes, got a model that returns none")
    if key is not None and key.kind == "lock":
        _six_settings(report, target, key, images, limit, _numbering(data, target))
        return
    original = key.original(target) if key else None
    note = _numbering(data, target)
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
    report.result(facts | ({"note": note} if note else {}), *lines)
    report.remark(*([f"note: {note}"] if note else []))


def _numbering(folder: Path, target: Target) -> str | None:
    """A note on classes numbered by their folders' names, if the model has another number of classes."""
    from stainlock.evaluation.layouts import numbered_folders
    from stainlock.stains.proof import classes_of

    names = numbered_folders(folder)
    total = classes_of(target) if names else 0
    if not names or len(names) == total:
        return None
    return (
        f"the {len(names)} class folders were numbered 0 to {len(names) - 1} by their names ({names[0]} is 0), and the"
        f" model tells {total} classes apart: if its numbers are others, put a labels.csv (file,class_index) there"
    )


def _six_settings(
    report: Report, locked: Target, key: Key, images: Images, limit: int | None, note: str | None
) -> None:
    from stainlock.evaluation.settings import six_settings

    with report.progress("evaluating six settings") as progress:
        found = six_settings(locked, key, images, limit=limit, progress=progress)
    as_given = found["locked"]
    facts: dict[str, Any] = {"metric": as_given.metric, "value": as_given.value, "images": as_given.images}
    facts |= {"top5": as_given.top5} | {setting: result.value for setting, result in found.items()}
    names = {setting: setting.replace("_", " + ") for setting in found}
    lines = [f"{names[setting]:17} top-1 {r.value:.2%}, top-5 {r.top5:.2%}" for setting, r in found.items()]
    report.result(facts | ({"note": note} if note else {}), *lines, f"on {as_given.images} images")
    report.remark(*([f"note: {note}"] if note else []))
