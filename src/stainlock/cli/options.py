"""Options that several verbs share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import stainlock
from stainlock.cli.report import Report

if TYPE_CHECKING:
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


def output_options(verb: Verb) -> Verb:
    """``--json`` and ``--quiet``; the verb is given a `Report` as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout.")
    @click.option("--quiet", is_flag=True, help="No progress and no remarks.")
    @functools.wraps(verb)
    def with_report(as_json: bool, quiet: bool, **arguments: Any) -> int | None:
        with Report(as_json, quiet) as report:
            _load_library()
            return verb(report, **arguments)

    return with_report


def _load_library() -> None:
    """Import the library, if the command started without it, before a factory's file asks for its names."""
    if not hasattr(stainlock, "Target"):
        importlib.reload(stainlock)


def weights_option(verb: Verb) -> Verb:
    return click.option(
        "--weights",
        metavar="FILE|pretrained|random",
        help="Weights of a library's or factory's model: a .safetensors, .pt or .pth file, 'pretrained' (the"
        " library's own, a download; the default) or 'random'.",
    )(verb)


def seed_option(meaning: str = "Seed of --weights random.") -> Callable[[Verb], Verb]:
    return click.option("--seed", type=click.IntRange(min=0), metavar="N", help=meaning)


def protection_options(protected: str) -> Callable[[Verb], Verb]:
    """``--out``, ``--key`` and ``--delta``: what every verb that protects a model writes."""

    def with_files(verb: Verb) -> Verb:
        for option in (
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


def load_model(reference: str, weights: str | None, seed: int | None = None) -> Target:
    from stainlock.models.references import load_reference

    return load_reference(reference, weights=weights, seed=seed or 0)
