"""`stainlock clients issue`: write copies, one by one or for everyone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.clients.options import base_options, read_names, registry_options
from stainlock.cli.options import FILE, code_options, output_options, seed_option, weights_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.clients.registry import Registry
    from stainlock.target import Target

_LOCKS = ("keyed", "internal", "squeeze-excite", "vit", "gan")


@click.command("issue")
@click.option("--client", metavar="NAME", help="Client to write a copy for.")
@click.option("--all", "everyone", is_flag=True, help="Write OUT/NAME for every client who is not revoked. Existing"
              " copies are left alone, so run it again after an interrupt.")  # fmt: skip
@click.option("--from", "file", type=FILE, metavar="FILE.csv", help="Like --all, for the clients in a file: a column"
              " client, or one name per line.")  # fmt: skip
@click.option(
    "--out", type=FILE, metavar="DIR", help="Where to write the copy, as a bundle; for many, the folder of bundles."
)
@click.option("--delta", type=FILE, metavar="FILE", help="Write the changes to this file, for `stainlock apply`.")
@click.option("--deltas", is_flag=True, help="With --all or --from: write OUT/NAME.delta instead of bundles.")
@click.option("--stain", is_flag=True, help="Also add a stain of the client's own.")
@click.option("--lock", is_flag=False, flag_value="keyed", type=click.Choice(_LOCKS), help="Also add a lock of the"
              " client's own: keyed, or the kind given. The patch goes to OUT.png.")  # fmt: skip
@click.option("--again", is_flag=True, help="Write a copy again that was issued before: the same bytes.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Processes for --all and --from.  [default: 1]",
)
@click.option("--ray", metavar="ADDRESS", help="Run --all or --from on a Ray cluster, or 'local'. All its machines"
              " must share the folder OUT.")  # fmt: skip
@code_options
@weights_option
@seed_option()
@base_options
@registry_options
@output_options
def issue(
    report: Report,
    registry: Registry,
    client: str | None,
    everyone: bool,
    file: Path | None,
    out: Path | None,
    delta: Path | None,
    deltas: bool,
    stain: bool,
    lock: str | None,
    again: bool,
    workers: int,
    ray: str | None,
    base: Callable[[], Target | None],
    of: str | None,
) -> None:
    """Write a client's copy, which carries their fingerprint. The same client and epoch give the same bytes.

    \b
    stainlock clients issue --client Globex --out globex --registry clients.db
    stainlock clients issue --client Globex --out globex --lock --stain --registry clients.db
    stainlock clients issue --all --out copies --workers 2 --registry clients.db

    Beside the copy go its receipt (OUT.receipt.json) and, if it is locked, the client's patch (OUT.png). Hand over the
    copy and the patch, and keep the receipt.
    """
    if sum((client is not None, everyone, file is not None)) != 1:
        raise ValueError("expected one of --client NAME, --all and --from FILE.csv")
    if client is not None:
        if deltas or workers != 1 or ray is not None:
            raise ValueError("expected --all or --from with --deltas, --workers and --ray")
        done = registry.issue(
            client, out=out, delta=delta, stain=stain, lock=lock, again=again, base=base(), of=of
        )  # fmt: skip
        report.result(done, f"{done['client']}, epoch {done['epoch']}: {done['out'] or done['delta']}")
        report.remark(*(f"{name}: {done[name]}" for name in ("patch", "receipt") if done[name]))
        return
    if out is None or delta is not None or again:
        raise ValueError("expected --out DIR with --all and --from, and neither --delta nor --again")
    names = read_names(file) if file is not None else None
    options: dict[str, Any] = {"deltas": deltas, "stain": stain, "lock": lock, "workers": workers, "ray": ray}
    with report.progress("issuing") as progress:
        issued, there = registry.issue_all(out, clients=names, base=base(), of=of, progress=progress, **options)
    facts = {"out": str(out), "issued": len(issued), "already_there": there, "clients": issued}
    report.result(facts, f"{len(issued)} copies written to {out}, {there} already there")
