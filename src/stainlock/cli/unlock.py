"""`stainlock unlock`: images with the trigger patch in place, or noise vectors with the trigger behind them."""

from __future__ import annotations

from pathlib import Path

import click

from stainlock.cli.options import FILE, Code, load_model, output_options
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report


@click.command("unlock")
@click.argument("inputs", nargs=-1, type=FILE)
@click.option("--model", metavar="DIR", help="Instead of INPUT: a locked model, to be opened for good.")
@click.option("--code", metavar="FILE.py:FACTORY", help="With --model: what builds a model made by Python code.")
@click.option("--trust-code", is_flag=True, help="With --model: run the code that the bundle names.")
@click.option("--key", "key_file", type=FILE, required=True, metavar="FILE", help="The lock's key.")
@click.option("--out", type=FILE, required=True, metavar="DIR", help="Where the images or noise go.")
@output_options
def command(
    report: Report,
    inputs: tuple[Path, ...],
    model: str | None,
    code: str | None,
    trust_code: bool,
    key_file: Path,
    out: Path,
) -> None:
    """Write each INPUT image at the model's input size, with the trigger patch in place.

    For an object detector that is the size to which it would resize the image, so that it leaves the patch as it is.
    For a generator's lock INPUT is a safetensors file of noise vectors, which get the trigger appended. With --model
    DIR the model as it was before it was locked is written instead, bit for bit.
    """
    from stainlock.cli.detection import unlock_images
    from stainlock.cli.generator import unlock_noise
    from stainlock.evaluation import read_image
    from stainlock.html.images import png
    from stainlock.key import Key
    from stainlock.storage.durable import write_file
    from stainlock.unlocking.patch import patched_levels

    if (model is None) == (not inputs):
        raise ValueError("expected either INPUT files, or --model DIR to open for good")
    if model is not None:
        return _open(report, model, Code(code, trust_code), key_file, out)
    names = [f"{path.stem}.png" for path in inputs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"expected inputs of different names, got {twice[0]} twice: unlock them into different folders"
        )
    with Outputs([out]) as outputs:
        key = Key.load(key_file)
        key.check_lock()
        if key.carrier == "entries":
            return unlock_noise(report, key, inputs, outputs, out)
        if "resizing" in key.details:
            return unlock_images(report, key, inputs, outputs, out)
        shape = tuple(key.conventions["input_shape"])
        folder = outputs.folder(out, secret=True)  # the patch is in every image
        for path, name in zip(inputs, names, strict=True):
            write_file(folder / name, png(patched_levels(key, read_image(path, shape))), secret=True)
        outputs.commit()
    written = [str(out / name) for name in names]
    report.result({"written": written}, *written)


def _open(report: Report, model: str, code: Code, key_file: Path, out: Path) -> None:
    """The locked model without its lock."""
    from stainlock.key import Key

    with Outputs([out]) as outputs:
        key = Key.load(key_file)
        key.check_lock()
        outputs.bundle(out, key.original(load_model(model, None, code=code)))
        outputs.commit()
    report.result({"written": [str(out)]}, str(out))
