"""`stainlock unlock`: put the trigger patch into images, or append the trigger to noise vectors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, Size, load_model, output_options
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.unlocking.noise import NoiseUnlock
    from stainlock.unlocking.patch_file import Patch


@click.command("unlock", cls=Verb)
@click.argument("inputs", nargs=-1, type=FILE)
@click.option("--key", "key_file", type=FILE, metavar="FILE", help="The lock's key, which the owner keeps.")
@click.option("--patch", "patch_file", type=FILE, metavar="FILE.png", help="Instead of --key: the client's patch, or a"
              " generator's vector as a .safetensors file.")  # fmt: skip
@click.option(
    "--out", type=FILE, metavar="DIR", help="Folder for the images or noise vectors, or for the model of --model."
)
@click.option("--check", is_flag=True, help="Instead of --out: check that each prepared INPUT still opens the model."
              " Exit status 1 if one does not.")  # fmt: skip
@click.option("--input-size", type=Size(), help="With --patch: the model's input size, if the file lacks it.")
@click.option("--model", metavar="DIR", help="Instead of INPUT: locked model to open for good.")
@click.option("--code", metavar="FILE.py:FACTORY", help="With --model: builds the model, if that takes Python code.")
@click.option(
    "--trust-code", is_flag=True, help="With --model: run the code that the bundle names, and print its path."
)
@output_options
def command(
    report: Report,
    inputs: tuple[Path, ...],
    key_file: Path | None,
    patch_file: Path | None,
    out: Path | None,
    check: bool,
    input_size: tuple[int, int] | None,
    model: str | None,
    code: str | None,
    trust_code: bool,
) -> int | None:
    """Write each INPUT image with the trigger patch in place.

    Images are written at the model's input size; for an object detector, at the size to which it would resize the
    image, so that it leaves the patch alone. The owner's key and the client's patch give the same result. For a
    generator's lock INPUT is a safetensors file of noise vectors, and the trigger is appended to each.

    With --model DIR the model is written as it was before the lock, bit for bit; only the key can do that. With --check
    nothing is written: the bits of a keyed lock's patch are read back from prepared images and compared with the key's.
    """
    if (model is None) == (not inputs):
        raise ValueError("expected either INPUT files, or --model DIR to open for good")
    if (key_file is None) == (patch_file is None):
        raise ValueError("expected either --key FILE, the owner's, or --patch FILE.png, the client's")
    if check:
        if out is not None or model is not None or key_file is None:
            raise ValueError("expected INPUT files and the owner's --key with --check, and neither --out nor --model")
        return _check(report, inputs, key_file)
    if out is None:
        raise ValueError("expected --out DIR to write to, or --check to read patches back")
    if model is not None:
        if key_file is None:
            raise ValueError("a patch does not open a model for good: expected the owner's --key with --model")
        _open(report, model, Code(code, trust_code), key_file, out)
        return None
    names = [f"{path.stem}.png" for path in inputs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"expected inputs of different names, got {twice[0]} twice: unlock them into different folders"
        )
    if patch_file is None and input_size is not None:
        raise ValueError("the key knows the model's input size: leave out --input-size")
    with Outputs([out]) as outputs:
        patch, append = _of_key(key_file) if key_file is not None else _of_client(patch_file)
        if append is not None:
            from stainlock.cli.generator import unlock_noise

            unlock_noise(report, append, inputs, outputs, out)
            return None
        assert patch is not None
        _unlock_images(report, patch, inputs, outputs, out, input_size)
    return None


def _check(report: Report, inputs: tuple[Path, ...], key_file: Path) -> int:
    from stainlock.evaluation.data import open_levels
    from stainlock.key import Key
    from stainlock.unlocking.reading import read_back

    key = Key.load(key_file)
    channels = int(key.conventions["input_shape"][0])
    rows, lines = [], []
    for path in inputs:
        reading = read_back(open_levels(path, channels)[None], key)
        rows.append({"file": str(path), "opens": bool(reading.opens[0]), "wrong_bits": int(reading.wrong[0]),
                     "unsure_bits": int(reading.unsure[0]), "margin": float(reading.margin[0])})  # fmt: skip
        lines.append(f"{path} {reading.said(0)}")
    report.result({"bits": reading.bits, "images": rows}, *lines)
    return 0 if all(row["opens"] for row in rows) else 1


def _of_key(path: Path) -> tuple[Patch | None, NoiseUnlock | None]:
    from stainlock.key import Key
    from stainlock.unlocking.noise import NoiseUnlock
    from stainlock.unlocking.patch_file import Patch

    key = Key.load(path)
    key.check_lock()
    if key.carrier == "entries":
        return None, NoiseUnlock.from_key(key, normalise=False)
    return Patch.from_key(key), None


def _of_client(path: Path | None) -> tuple[Patch | None, NoiseUnlock | None]:
    from stainlock.errors import FileError
    from stainlock.unlocking.noise import NoiseUnlock
    from stainlock.unlocking.patch_file import Patch

    assert path is not None
    if not path.is_file():
        raise FileError(f"{path} does not exist: expected the client's patch, a PNG")
    if path.suffix.lower() == ".safetensors":
        return None, NoiseUnlock.from_file(path, normalise=False)
    return Patch.read(path), None


def _unlock_images(
    report: Report,
    patch: Patch,
    inputs: tuple[Path, ...],
    outputs: Outputs,
    out: Path,
    size: tuple[int, int] | None,
) -> None:
    from stainlock.cli.detection import unlock_images
    from stainlock.evaluation import read_image
    from stainlock.evaluation.data import open_levels
    from stainlock.html.images import png
    from stainlock.storage.durable import write_file

    if patch.resizing:
        return unlock_images(report, patch, inputs, outputs, out)
    channels = len(patch.levels)
    told = tuple(patch.conventions["input_shape"][1:]) if patch.conventions else None
    if told is not None and size is not None and size != told:
        raise ValueError(f"the patch is for a model with inputs of {told[0]}×{told[1]}: leave out --input-size")
    size = size or told
    folder = outputs.folder(out, secret=True)  # the patch is in every image
    written = []
    for path in inputs:
        levels = read_image(path, (channels, *size)) if size else open_levels(path, channels)
        write_file(folder / f"{path.stem}.png", png(patch.paste(levels)), secret=True)
        written.append(str(out / f"{path.stem}.png"))
    outputs.commit()
    report.result({"written": written}, *written)
    if size is None:
        report.remark("the patch file lacks the model's input size, so images kept their own: --input-size sets it")


def _open(report: Report, model: str, code: Code, key_file: Path, out: Path) -> None:
    """The locked model without its lock."""
    from stainlock.key import Key

    with Outputs([out]) as outputs:
        key = Key.load(key_file)
        key.check_lock()
        outputs.model(out, key.original(load_model(model, None, code=code)))
        outputs.commit()
    report.result({"written": [str(out)]}, str(out))
