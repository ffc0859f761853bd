"""`stainlock clients export`: the registry as a table, or one copy's keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stainlock.cli.clients.options import base_options, ledger_options, opened
from stainlock.cli.options import FILE, code_options, output_options, seed_option, weights_option
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.clients.ledger import Ledger
    from stainlock.target import Target


@click.command("export")
@click.option("--out", type=FILE, required=True, metavar="FILE.csv|DIR", help="Where to write the table; with --client,"
              " the folder for the keys.")  # fmt: skip
@click.option("--client", metavar="NAME", help="Instead of the table: recreate the owner's keys to the stain and the"
              " lock of this client's copy.")  # fmt: skip
@click.option(
    "--epoch", type=click.IntRange(min=1), metavar="N", help="With --client: epoch of the copy.  [default: the current]"
)
@code_options
@weights_option
@seed_option()
@base_options
@ledger_options
@output_options
def export(
    report: Report,
    registry: Ledger,
    out: Path,
    client: str | None,
    epoch: int | None,
    base: Callable[[], Target | None],
    of: str | None,
) -> None:
    """Write all clients and copies as CSV, or the keys of one copy.

    The table has nothing secret in it; the keys are secret.

    \b
    stainlock clients export --out clients.csv --registry clients.db
    stainlock clients export --client Globex --out globex-keys --registry clients.db
    """
    if client is None:
        if epoch is not None or of is not None:
            raise ValueError("expected --client NAME with --epoch and --of")
        with Outputs([out]) as outputs:
            lines = registry.export(outputs.place(out))
            outputs.commit()
        report.result({"out": str(out), "lines": lines}, f"{lines} lines written to {out}")
        return
    with opened(registry.path, registry.secret_path) as whole:
        copy = whole.copy(client, epoch=epoch, base=base(), of=of)
    keys = {"stain.key": copy.stain_key, "lock.key": copy.lock_key}
    written = [name for name, key in keys.items() if key is not None]
    if not written:
        raise ValueError(f"{client}'s copy has neither a stain nor a lock, so there are no keys to it")
    with Outputs([out]) as outputs:
        folder = outputs.folder(out, secret=True)
        for name, key in keys.items():
            if key is not None:
                key.save(folder / name)
        outputs.commit()
    report.result({"out": str(out), "written": written}, *(f"{out / name} (secret)" for name in written))
