"""`stainlock clients`: who has which copy of a model, and who leaked one."""

from __future__ import annotations

import click

from stainlock.cli.clients.issue import issue
from stainlock.cli.clients.manage import add, check, init, listing, revoke, rotate, show
from stainlock.cli.clients.trace import trace
from stainlock.cli.clients.write import export


class _InOrder(click.Group):
    """Lists the verbs in the order in which they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    "clients",
    cls=_InOrder,
    invoke_without_command=True,
    short_help="Give every client a copy of their own, and trace a leaked one.",
)
@click.pass_context
def command(context: click.Context) -> None:
    """Give every client a copy of a model that carries their own hidden fingerprint, and trace a leaked copy.

    \b
    stainlock clients init mine.py:model --registry clients.db
    stainlock clients add "Acme Ltd" Globex --registry clients.db
    stainlock clients issue --client Globex --out globex --registry clients.db
    stainlock clients trace leaked.safetensors --registry clients.db --report trace.html

    The registry keeps names and dates. All secrets are derived from one master secret, a file beside it
    (clients.secret): back it up. Leaks can be traced without the registry, but never without the master secret.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (init, add, listing, show, issue, rotate, revoke, trace, export, check):
    command.add_command(verb)
