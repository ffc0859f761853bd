"""Options that the verbs of `stainlock clients` share."""

from __future__ import annotations

import csv
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.options import FILE, NO_CODE, Code, Verb, load_model, load_models

if TYPE_CHECKING:
    from stainlock.clients.ledger import Ledger
    from stainlock.clients.registry import Registry
    from stainlock.target import Target

PASSPHRASE = "STAINLOCK_PASSPHRASE"


def registry_options(verb: Verb) -> Verb:
    """``--registry`` and ``--secret``; the verb is given a `Registry`."""
    return _with_registry(verb, opened)


def ledger_options(verb: Verb) -> Verb:
    """The same for verbs that need no model: they are given a `Ledger`, and torch is not loaded."""
    return _with_registry(verb, opened_ledger)


def _with_registry(verb: Verb, open_it: Callable[[Path, Path | None], Ledger]) -> Verb:
    @registry_option(required=True)
    @secret_option
    @functools.wraps(verb)
    def with_registry(registry: Path, secret: Path | None, **arguments: Any) -> int | None:
        with open_it(registry, secret) as found:
            return verb(registry=found, **arguments)

    return with_registry


def registry_option(*, required: bool) -> Callable[[Verb], Verb]:
    return click.option(
        "--registry", type=FILE, required=required, metavar="FILE", help="The registry, an SQLite file."
    )


def secret_option(verb: Verb) -> Verb:
    return click.option(
        "--secret",
        type=FILE,
        metavar="FILE",
        help=f"The master secret. If it has a passphrase, you are asked for it unless {PASSPHRASE} is set.  [default:"
        " the registry's name, ending in .secret]",
    )(verb)


def opened(registry: Path, secret: Path | None, *, passphrase: Callable[[], str] | None = None) -> Registry:
    from stainlock.clients.registry import Registry

    return Registry(registry, secret=secret, passphrase=passphrase or asked_passphrase)


def opened_ledger(registry: Path, secret: Path | None) -> Ledger:
    from stainlock.clients.ledger import Ledger

    return Ledger(registry, secret=secret, passphrase=asked_passphrase)


def asked_passphrase() -> str:
    """The passphrase from the environment, or typed at the terminal."""
    if given := os.environ.get(PASSPHRASE):
        return given
    return _ask(confirm=False)


def new_passphrase() -> str:
    """The same, typed twice."""
    return os.environ.get(PASSPHRASE) or _ask(confirm=True)


def _ask(*, confirm: bool) -> str:
    if not sys.stdin.isatty():
        raise ValueError(f"expected a passphrase in {PASSPHRASE}, or a terminal to ask for it")
    typed: str = click.prompt("passphrase", hide_input=True, confirmation_prompt=confirm, err=True)
    return typed


def base_options(verb: Verb) -> Verb:
    """``--base``, ``--of`` and what it takes to load a model; the verb is given ``base``, a function, and ``of``."""

    @click.option("--base", "reference", metavar="MODEL", help="The base model, if it has moved since it was"
                  " registered.")  # fmt: skip
    @click.option("--of", metavar="NAME[@VERSION]", help="Registered model, if there are several; without"
                  " @VERSION its latest.")  # fmt: skip
    @functools.wraps(verb)
    def with_base(reference: str | None, of: str | None, weights: str | None, seed: int | None, code: Code,
                  **arguments: Any) -> int | None:  # fmt: skip
        def base() -> Target | None:
            if reference is None:
                return None
            return load_model(reference, weights, seed, code)

        if reference is None and (weights is not None or code != NO_CODE):
            raise ValueError("expected --base MODEL with --weights, --model, --trust-code and options of its pixels")
        return verb(base=base, of=of, **arguments)

    return with_base


def bases_options(verb: Verb) -> Verb:
    """The same for any number of base models; the verb is given ``bases``, a function, and ``of``."""

    @click.option("--base", "references", multiple=True, metavar="MODEL", help="A base model that has moved since it"
                  " was registered; repeat for several. The suspect is compared with these"
                  " only.")  # fmt: skip
    @click.option("--weights", multiple=True, metavar="FILE|pretrained|random", help="Weights of --base, if that is a"
                  " library's or factory's model; with several, one for each in the same order.")  # fmt: skip
    @click.option("--of", metavar="NAME[@VERSION]", help="Registered model to compare with.  [default: all]")
    @functools.wraps(verb)
    def with_bases(references: tuple[str, ...], weights: tuple[str, ...], of: str | None, seed: int | None, code: Code,
                   **arguments: Any) -> int | None:  # fmt: skip
        if not references and (weights or code != NO_CODE):
            raise ValueError("expected --base MODEL with --weights, --model, --trust-code and options of its pixels")
        if weights and len(weights) != len(references):
            raise ValueError(f"expected --weights for each of {len(references)} base models, got {len(weights)}")

        def bases() -> list[Target]:
            return load_models(references, weights or [None] * len(references), seed, code)

        return verb(bases=bases, of=of, **arguments)

    return with_bases


def read_names(path: Path) -> list[str]:
    """Clients from a file: a CSV file with a column ``client``, or one name per line."""
    from stainlock.errors import FileError

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"can't read clients from {path}: {getattr(error, 'strerror', None) or error}") from error
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    if not rows:
        raise FileError(f"{path} has no clients in it")
    if "client" in rows[0]:
        column = rows[0].index("client")
        if short := [number for number, row in enumerate(rows, 1) if len(row) <= column]:
            raise FileError(f"{path} line {short[0]} has no client: expected {column + 1} columns or more")
        return [row[column].strip() for row in rows[1:]]
    if any(len(row) > 1 for row in rows):
        raise FileError(f"{path} has several columns and none called client: name the column of names client")
    return [row[0].strip() for row in rows]
