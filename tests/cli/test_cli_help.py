"""--help: examples whose options exist, sections in one order, and defaults shown in one way."""

from __future__ import annotations

import re

import click
import pytest
from conftest import Run

from stainlock.cli.app import VERBS, stainlock
from stainlock.cli.help import _RESEARCH, EXAMPLES, Verb

EXPLAINED = [verb for verb in VERBS if isinstance(stainlock.get_command(click.Context(stainlock), verb), Verb)]


def command(verb: str) -> click.Command:
    found = stainlock.get_command(click.Context(stainlock), verb)
    assert found is not None
    return found


def test_locks_are_spoken_of(run: Run) -> None:
    assert "and lock them" in " ".join(run("--help").stdout.split())
    assert set(EXAMPLES) == set(EXPLAINED)


@pytest.mark.parametrize("verb", EXPLAINED)
def test_help_has_examples_and_sections(run: Run, verb: str) -> None:
    shown = run(verb, "--help").stdout
    options = {name for given in command(verb).params for name in (*given.opts, *given.secondary_opts)}
    for line in EXAMPLES[verb]:
        assert f"stainlock {line}" in shown
        assert line.split()[0] == verb
        assert {word for word in line.split() if word.startswith("--")} <= options
    headings = re.findall(r"^([A-Z][a-z ]+):$", shown, re.MULTILINE)
    order = ["Options", "Model", "Research options", "Output", "Examples"]
    assert headings == [heading for heading in order if heading in headings]
    assert headings[0] in ("Options", "Model")
    assert headings[-2:] == ["Output", "Examples"]


@pytest.mark.parametrize("verb", EXPLAINED)
def test_defaults_are_shown_in_one_way(verb: str) -> None:
    for given in command(verb).params:
        text = getattr(given, "help", None) or ""
        assert not re.search(r"by default|the default\b|\([a-z0-9]+\)\.?$", text), f"{verb} {given.name}: {text}"
        assert not re.search(r"\[default(?!: )", text)


@pytest.mark.parametrize("verb", sorted(_RESEARCH))
def test_research_options_exist(verb: str) -> None:
    assert _RESEARCH[verb] <= {given.name for given in command(verb).params}
