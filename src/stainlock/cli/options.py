"""Options that several verbs share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


class Position(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

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


def output_options(verb: Verb) -> Verb:
    """``--json`` and ``--quiet``; the verb is given a `Report` as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout.")
    @click.option("--quiet", is_flag=True, help="No progress and no remarks.")
    @functools.wraps(verb)
    def with_report(as_json: bool, quiet: bool, **arguments: Any) -> int | None:
        with Report(as_json, quiet) as report:
            try:
                return verb(report, **arguments)
            except (SystemExit, click.exceptions.Exit) as error:  # of a model's own code: its status is no verdict
                raise StainlockError(f"the model's code tried to end the program ({type(error).__name__})") from error

    return with_report


_OUTPUT = "stainlock.output"


def weights_option(verb: Verb) -> Verb:
    """``--weights``, and ``--output``, which `load_model` looks up."""

    def remember(context: click.Context, _: click.Parameter, name: str | None) -> None:
        context.meta[_OUTPUT] = name

    verb = click.option(
        "--output",
        metavar="NAME",
        expose_value=False,
        callback=remember,
        help="Which entry of the model's output is its answer, where that is a dictionary, a dataclass or a tuple:"
        " logits, 0, heads.class.  [default: logits, out, or the only tensor]",
    )(verb)
    return click.option(
        "--weights",
        metavar="FILE|pretrained|random",
        help="Weights of a library's or factory's model: a .safetensors, .pt or .pth file, 'pretrained' (the"
        " library's own, a download; the default) or 'random'.",
    )(verb)


def seed_option(meaning: str = "Seed of --weights random.") -> Callable[[Verb], Verb]:
    return click.option("--seed", type=click.IntRange(min=0), metavar="N", help=meaning)


KIT_FORMATS = ("torch-export", "onnx", "safetensors", "bundle")


def protection_options(protected: str) -> Callable[[Verb], Verb]:
    """``--out``, ``--key``, ``--client`` and ``--delta``: what every verb that protects a model writes."""

    def with_files(verb: Verb) -> Verb:
        for option in (
            click.option(
                "--format",
                type=click.Choice(KIT_FORMATS),
                help="With --client: the model's form.  [default: torch-export, or safetensors where PyTorch can't"
                " export the model]",
            ),
            click.option(
                "--client",
                type=FILE,
                metavar="DIR",
                help="Also write a folder to ship: the model, its patch, a loader that needs no stainlock, README.txt.",
            ),
            click.option(
                "--delta", type=FILE, metavar="FILE", help="Also write the changes alone, for `stainlock apply`."
            ),
            click.option(
                "--key", "key_file", type=FILE, required=True, metavar="FILE", help="Where the secret key goes."
            ),
            click.option(
                "--out", type=FILE, required=True, metavar="DIR", help=f"Where the {protected} model goes, as a bundle."
            ),
        ):
            verb = option(verb)
        return verb

    return with_files


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
    """What may build the models of bundles, besides libraries: code the user names, or else what a bundle names."""

    model: str | None = None
    trusted: bool = False

    @property
    def given(self) -> bool:
        return self.model is not None or self.trusted

    def build(self, bundle: Bundle) -> Target:
        if bundle.needs_code and self.trusted and self.model is None:
            click.echo(printable(f"running the code that {bundle.path} names: {bundle.code}"), err=True)
        return bundle.build(model=self.model, trust_code=self.trusted)


NO_CODE = Code()


def code_options(verb: Verb) -> Verb:
    """``--model`` and ``--trust-code``; the verb is given both as ``code``."""

    @click.option("--model", "architecture", metavar="FILE.py:FACTORY", help="What builds the model of a bundle that is"
                  " made by Python code: bundles' own code is not run unasked.")  # fmt: skip
    @click.option("--trust-code", is_flag=True, help="Run the code that the bundle names. Its path is printed.")
    @functools.wraps(verb)
    def with_code(architecture: str | None, trust_code: bool, **arguments: Any) -> int | None:
        return verb(code=Code(architecture, trust_code), **arguments)

    return with_code


def load_model(reference: str, weights: str | None, seed: int | None = None, code: Code = NO_CODE) -> Target:
    from stainlock.models.bundle import Bundle
    from stainlock.models.references import load_reference, refuse_weights

    if Path(reference).is_dir():
        refuse_weights(reference, weights)
        target = code.build(Bundle.read(reference))
    else:
        target = load_reference(reference, weights=weights, seed=seed or 0, model=code.model, trust_code=code.trusted)
    context = click.get_current_context(silent=True)
    return replace(target, output=(context and context.meta.get(_OUTPUT)) or target.output)


def load_models(references: Sequence[str], weights: Sequence[str | None], seed: int | None, code: Code) -> list[Target]:
    """Several; ``code`` is for those that are bundles."""
    bundles = [Path(reference).is_dir() for reference in references]
    return [
        load_model(reference, own, seed, code if is_bundle or not any(bundles) else NO_CODE)
        for reference, own, is_bundle in zip(references, weights, bundles, strict=True)
    ]
