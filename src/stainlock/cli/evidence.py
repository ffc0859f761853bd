"""`stainlock verify --report`: the evidence as an HTML page."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from stainlock.cli.commitments import commitment_lines
from stainlock.cli.services import Behind

if TYPE_CHECKING:
    from stainlock.commitments.check import Check
    from stainlock.key import Key
    from stainlock.verification import Verdict


def _arguments() -> list[str]:
    """The command line, so that others can repeat it."""
    context = click.get_current_context()
    words = [str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        value = context.params.get(name)
        if context.get_parameter_source(name) != ParameterSource.COMMANDLINE or name == "page":
            continue
        for one in value if isinstance(value, tuple) else (value,):
            option = [] if isinstance(parameter, click.Argument) else [parameter.opts[-1]]
            words += option if one is True else [*option, str(one)]
    return words


def write_page(
    place: Path, loaded: Any, key: Key, key_file: Path, verdict: Verdict, facts: dict[str, Any],
    checked: Check | None, behind: Behind | None, suspect: str | None,
) -> None:  # fmt: skip
    from stainlock.commitments.opening import suspect_digest
    from stainlock.evidence import Evidence, evidence_page
    from stainlock.storage.durable import write_file

    evidence = Evidence(
        suspect=behind.name if behind is not None else str(suspect), suspect_digest=suspect_digest(loaded),
        key=key, key_digest=hashlib.sha256(key_file.read_bytes()).hexdigest(), verdict=verdict, facts=facts,
        arguments=_arguments(), check=checked,
        commitment_lines=commitment_lines(checked) if checked is not None else (),
        answers=behind.first_answers if behind is not None else {},
    )  # fmt: skip
    write_file(place, evidence_page(evidence).encode(), secret=True)
