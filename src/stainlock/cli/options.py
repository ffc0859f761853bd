"""Options that several verbs share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.report import Report, printable
from stainlock.errors import StainlockError

if TYPE_CHECKING:
    from stainlock.kits.kit import Kit
    from stainlock.models.bundle import Bundle
    from stainlock.target import Target

Verb = Callable[..., int | None]
FILE = click.Path(path_type=Path)


_LOADED: list[Target] = []  # models loaded in this run; the summary prints their conventions


class Position(click.ParamType[tuple[int, ...]]):
    """Whole numbers separated by commas."""

    name = "R,C"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"expected a position like 7,7, got {value!r}", param, ctx)


class Size(click.ParamType[tuple[int, int]]):
    """Rows and columns."""

    name = "RxC"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        try:
            rows, columns = (int(part) for part in str(value).split("x"))
        except ValueError:
            self.fail(f"expected a size like 32x32, got {value!r}", param, ctx)
        return rows, columns


class Shape(click.ParamType[tuple[int, ...]]):
    """Rows and columns, or channels, rows and columns; one number for a square."""

    name = "RxC"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in str(value).replace("×", "x").split("x"))
        except ValueError:
            numbers = ()
        if not 1 <= len(numbers) <= 3 or min(numbers) < 1:
            self.fail(f"expected a size like 224, 224x192 or 3x32x32, got {value!r}", param, ctx)
        return numbers * 2 if len(numbers) == 1 else numbers


class Numbers(click.ParamType[tuple[float, ...]]):
    """Numbers separated by commas."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            numbers = (math.nan,)
        if not all(map(math.isfinite, numbers)):
            self.fail(f"expected numbers like 0.485,0.456,0.406, got {value!r}", param, ctx)
        return numbers


def output_options(verb: Verb) -> Verb:
    """``--json`` and ``--quiet``; the verb is given a `Report` as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout.")
    @click.option("--quiet", is_flag=True, help="Print no progress and no remarks.")
    @functools.wraps(verb)
    def with_report(as_json: bool, quiet: bool, **arguments: Any) -> int | None:
        _LOADED.clear()
        with Report(as_json, quiet) as report:
            try:
                status = verb(report, **arguments)
                for target in _LOADED[:1]:  # others have the first one's conventions, or are compared with it
                    report.remark(*conventions_lines(target))
                return status
            except (SystemExit, click.exceptions.Exit) as error:  # from the model's own code: not a verdict
                raise StainlockError(f"the model's code tried to end the program ({type(error).__name__})") from error

    return with_report


_OUTPUT = "stainlock.output"


def weights_option(verb: Verb) -> Verb:
    """``--weights``, and ``--output``, which `load_model` reads from click's context."""

    def remember(context: click.Context, _: click.Parameter, name: str | None) -> None:
        context.meta[_OUTPUT] = name

    verb = click.option(
        "--output",
        metavar="NAME",
        expose_value=False,
        callback=remember,
        help="Entry of the model's output to use, if that is a dictionary, dataclass or tuple, such as logits, 0 or"
        " heads.class.  [default: logits, out, or the only tensor]",
    )(verb)
    return plain_weights_option(verb)


def plain_weights_option(verb: Verb) -> Verb:
    """``--weights`` alone, for verbs that keep a model's reference instead of loading it here."""
    return click.option(
        "--weights",
        metavar="FILE|pretrained|random",
        help="Weights for a library's or factory's model: a .safetensors, .pt or .pth file, 'pretrained' (the"
        " library's own, downloaded) or 'random'.  [default: pretrained, or the factory's own]",
    )(verb)


def seed_option(meaning: str = "Seed for random weights.  [default: 0]") -> Callable[[Verb], Verb]:
    return click.option("--seed", type=click.IntRange(min=0), metavar="N", help=meaning)


KIT_FORMATS = ("torch-export", "onnx", "safetensors", "bundle")


def protection_options(protected: str) -> Callable[[Verb], Verb]:
    """``--out``, ``--key``, ``--client`` and ``--delta``: what every verb that protects a model writes."""

    def with_files(verb: Verb) -> Verb:
        for option in (
            click.option(
                "--format",
                type=click.Choice(KIT_FORMATS),
                help="With --client: format of the model.  [default: torch-export, or safetensors if PyTorch can't"
                " export the model]",
            ),
            click.option(
                "--client",
                type=FILE,
                metavar="DIR",
                help="Also write a folder to ship: the model, its patch if locked, README.txt, and a loader that does"
                " not need stainlock.",
            ),
            click.option(
                "--delta", type=FILE, metavar="FILE", help="Also write the changes to this file, for `stainlock apply`."
            ),
            click.option(
                "--key", "key_file", type=FILE, required=True, metavar="FILE", help="Where to write the secret key."
            ),
            click.option(
                "--out",
                type=FILE,
                required=True,
                metavar="DIR",
                help=f"Where to write the {protected} model, as a bundle; FILE.onnx if MODEL is an ONNX file.",
            ),
        ):
            verb = option(verb)
        return verb

    return with_files


def check_out(model: str, out: Path) -> None:
    """Refuse, before the work starts, a folder for an ONNX model and an ONNX file for any other."""
    from stainlock.storage.onnx_files import is_onnx

    if is_onnx(model) and not is_onnx(out):
        raise ValueError(f"{model} is an ONNX file and stays one: expected --out FILE.onnx, got {out}")
    if is_onnx(out) and not is_onnx(model):
        raise ValueError(
            f"expected a folder as --out for {model}, got {out}: write a bundle, then `stainlock export` it"
        )


def check_format(client: Path | None, format: str | None) -> None:
    if format is not None and client is None:
        raise ValueError(f"expected --client DIR with --format {format}")


def kit_facts(client: Path | None, kit: Kit | None) -> dict[str, Any]:
    if kit is None:
        return {}
    return {"client": str(client), "format": kit.format, "max_difference": kit.max_difference}


def kit_lines(client: Path | None, kit: Kit | None) -> list[str]:
    if kit is None:
        return []
    lines = [f"client: {client} (to ship: {', '.join(kit.files)})"]
    if kit.reason:
        lines.append(f"note: its model is {kit.format}: {kit.reason}")
    return lines


@dataclass(frozen=True)
class Code:
    """Code that may build a bundle's model: what the user names, or, if trusted, what the bundle names."""

    model: str | None = None
    trusted: bool = False
    pixels: Mapping[str, Any] = field(default_factory=dict)  # conventions that the user gave

    @property
    def given(self) -> bool:
        return self.model is not None or self.trusted

    def build(self, bundle: Bundle) -> Target:
        if bundle.needs_code and self.trusted and self.model is None:
            click.echo(printable(f"running the code that {bundle.path} names: {bundle.code}"), err=True)
        return bundle.build(model=self.model, trust_code=self.trusted)


NO_CODE = Code()


def bundle_code_options(verb: Verb) -> Verb:
    """``--model`` and ``--trust-code``; the verb is given them as ``code``."""

    @click.option("--model", "architecture", metavar="FILE.py:FACTORY", help="Function that builds a bundle's model, if"
                  " that takes Python code. A bundle's own code is not run unless you ask.")  # fmt: skip
    @click.option("--trust-code", is_flag=True, help="Run the code that the bundle names, and print its path.")
    @functools.wraps(verb)
    def with_code(architecture: str | None, trust_code: bool, **arguments: Any) -> int | None:
        return verb(code=Code(architecture, trust_code), **arguments)

    return with_code


def code_options(verb: Verb) -> Verb:
    """``--model``, ``--trust-code`` and the pixel conventions; the verb is given them as ``code``."""

    @bundle_code_options
    @click.option("--input-size", type=Shape(), help="Input size of MODEL: 224, 224x192 or 3x32x32 (channels first)."
                  "  [default: from the library, bundle or Target, else guessed]")  # fmt: skip
    @click.option("--mean", type=Numbers(), help="Subtracted from pixels before MODEL.  [default: as for --input-size]")
    @click.option("--std", type=Numbers(), help="Pixels are then divided by this.  [default: as for --input-size]")
    @click.option(
        "--bounds", type=Numbers(), help="Smallest and largest pixel value.  [default: as for --input-size, or 0,1]"
    )
    @functools.wraps(verb)
    def with_pixels(
        code: Code,
        input_size: tuple[int, ...] | None,
        mean: tuple[float, ...] | None,
        std: tuple[float, ...] | None,
        bounds: tuple[float, ...] | None,
        **arguments: Any,
    ) -> int | None:
        given = {"input_shape": input_size, "mean": mean, "std": std, "bounds": bounds}
        pixels = {name: value for name, value in given.items() if value is not None}
        return verb(code=replace(code, pixels=pixels), **arguments)

    return with_pixels


def load_model(reference: str, weights: str | None, seed: int | None = None, code: Code = NO_CODE) -> Target:
    from stainlock.models.bundle import Bundle
    from stainlock.models.conventions import with_pixels
    from stainlock.models.references import load_reference, refuse_weights

    if Path(reference).is_dir():
        refuse_weights(reference, weights)
        if code.pixels:
            option = {"input_shape": "input-size"}.get(name := next(iter(code.pixels)), name)
            raise ValueError(f"{reference} is a bundle, which says how it takes pixels: leave out --{option}")
        found = code.build(Bundle.read(reference))
    else:
        found = load_reference(
            reference, weights=weights, seed=seed or 0, model=code.model, trust_code=code.trusted,
            input_shape=code.pixels.get("input_shape"),
        )  # fmt: skip
        found = with_pixels(found, code.pixels)
    context = click.get_current_context(silent=True)
    found = replace(found, output=(context and context.meta.get(_OUTPUT)) or found.output)
    tell_conventions(found)
    return found


def tell_conventions(target: Target) -> None:
    """Make this run's summary say how the model takes pixels."""
    _LOADED.append(target)


def conventions_facts(target: Target) -> dict[str, Any]:
    """How the model takes pixels, for a summary."""
    return {
        "input_shape": list(target.input_shape), "mean": list(target.mean), "std": list(target.std),
        "bounds": list(target.bounds), "known_from": target.known_from,
    }  # fmt: skip


def conventions_lines(target: Target) -> list[str]:
    from stainlock.models.conventions import SIZE_ALONE

    shape = "×".join(map(str, target.input_shape))
    mean, std = (", ".join(f"{v:g}" for v in values) for values in (target.mean, target.std))
    low, high = target.bounds
    told = "normalised by the model itself" if target.normalises else f"mean {mean}, std {std}"
    lines = [f"input: {shape}, pixels from {low:g} to {high:g}, {told} ({target.known_from})"]
    if target.guessed:
        size_alone = target.guessed == SIZE_ALONE
        what = "the size of this model's images" if size_alone else "how this model takes images"
        options = "--input-size" if size_alone else "--input-size, --mean, --std and --bounds"
        lines.append(
            f"note: {what} is not known, so the above is a guess. If it is wrong, patches and triggers do not work:"
            f" set {options}, or return a stainlock.Target"
        )
    return lines


def load_models(references: Sequence[str], weights: Sequence[str | None], seed: int | None, code: Code) -> list[Target]:
    """Load several models; ``code`` is for those that are bundles."""
    bundles = [Path(reference).is_dir() for reference in references]
    return [
        load_model(reference, own, seed, code if is_bundle or not any(bundles) else Code(pixels=code.pixels))
        for reference, own, is_bundle in zip(references, weights, bundles, strict=True)
    ]
