"""Advice on a wrong command line, for errors where the parser only says what was wrong."""

from __future__ import annotations

import re
import shlex

import click

# For each verb, the option that a stray word was most likely meant for.
_MEANT = {
    "clients issue": "--client",
    "clients export": "--client",
    "verify": "--key",
    "attack": "--attack",
    "inspect": "--weights",
    "reproduce": "--out",
    "demo": "--out",
}
_SURPLUS = re.compile(r"Got unexpected extra argument(s?) \((.*)\)", re.S)


def advice(error: click.ClickException) -> str:
    """A clause to append to the parser's message; empty if there is nothing to add."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    verb = context.command_path.partition(" ")[2]
    if isinstance(error, click.NoSuchOption) and error.option_name == "--client":
        named = [param for param in context.command.params if isinstance(param, click.Argument)]
        return f": give the name itself, `{verb} NAME`" if any(p.name in ("name", "names") for p in named) else ""
    surplus = _SURPLUS.fullmatch(error.message)
    if surplus is None:
        return ""
    first = surplus[2].split(" ")[0] if surplus[1] else surplus[2]  # several are joined by spaces
    if verb in _MEANT:
        return f": did you mean {_MEANT[verb]} {shlex.quote(first)}?"
    return ": every word needs the option it belongs to before it"
