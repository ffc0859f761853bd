"""Wrong command lines: the error says what to write instead."""

from __future__ import annotations

import click
import pytest
from conftest import Run

from stainlock.cli import mistakes
from stainlock.cli.app import stainlock

REGISTRY = ("--registry", "clients.db")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["clients", "issue", "acme", *REGISTRY], "did you mean --client acme? (see stainlock clients issue --help)"),
        (["clients", "issue", "Acme Ltd", *REGISTRY], "did you mean --client 'Acme Ltd'?"),
        (["clients", "issue", "acme", "globex", *REGISTRY], "did you mean --client acme?"),
        (["clients", "export", "acme", "--out", "keys", *REGISTRY], "did you mean --client acme?"),
        (["verify", "leaked", "--key", "a.key", "b.key"], "did you mean --key b.key?"),
        (["attack", "stained", "prune"], "did you mean --attack prune?"),
        (["diff", "a", "b", "c"], "(c): every word needs the option"),
        (["clients", "show", "--client", "acme"], "give the name itself, `clients show NAME`"),
        (["clients", "revoke", "--client", "acme"], "give the name itself, `clients revoke NAME`"),
        (["verify", "leaked", "--key", "a.key", "--client", "acme"], "No such option"),
    ],
)
def test_the_error_says_what_to_write(run: Run, line: list[str], says: str) -> None:
    told = run(*line)
    assert told.status == 2
    assert says in told.stderr
    assert told.stderr.count("\n") == 1


def test_every_option_that_is_proposed_exists() -> None:
    for line, option in mistakes._MEANT.items():
        command: click.Command = stainlock
        for word in line.split():
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), word)
            assert found is not None, line
            command = found
        assert any(option in param.opts for param in command.params), line
