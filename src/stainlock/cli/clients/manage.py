"""`stainlock clients init|add|list|show|rotate|revoke|check`: models, clients and the master secret."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.clients.options import (
    asked_passphrase,
    ledger_options,
    new_passphrase,
    opened,
    read_names,
    registry_option,
    secret_option,
)
from stainlock.cli.options import FILE, Code, bundle_code_options, output_options, plain_weights_option, seed_option
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.clients.ledger import Ledger
    from stainlock.clients.records import Client


@click.command("init")
@click.argument("model")
@registry_option(required=True)
@secret_option
@click.option("--name", metavar="NAME", help="Name for the model.  [default: the end of its reference]")
@click.option(
    "--new-version", is_flag=True, help="Replace the model of that name: everyone's next copy is of this one."
)
@click.option("--passphrase", "protect", is_flag=True, help="Protect a new master secret with a passphrase.")
@click.option("--amplitude", type=click.FloatRange(0, 1, min_open=True, max_open=True), help="Size of the fingerprints"
              " relative to the weights.  [default: 0.01]")  # fmt: skip
@click.option("--chips", type=int, help="Length of the fingerprints' codes, a multiple of 1024.  [default: 16384]")
@bundle_code_options
@plain_weights_option
@seed_option()
@output_options
def init(
    report: Report,
    model: str,
    registry: Path,
    secret: Path | None,
    name: str | None,
    new_version: bool,
    protect: bool,
    amplitude: float | None,
    chips: int | None,
    weights: str | None,
    seed: int | None,
    code: Code,
) -> None:
    """Register a base model.

    The first call also creates the registry and the master secret. Copies are later made from MODEL as its reference
    loads it: if its input size, mean or std must be given, let a factory return a stainlock.Target.

    \b
    stainlock clients init mine.py:model --registry clients.db
    stainlock clients init mine.py:better --registry clients.db --name model --new-version
    """
    options: dict[str, Any] = {"weights": weights, "seed": seed, "model": code.model, "trust_code": code.trusted}
    options |= {"chips": chips, "amplitude": amplitude}
    with opened(registry, secret, passphrase=new_passphrase if protect else None) as found:
        is_new = not found.secret_path.exists()
        if is_new and not protect:
            found.passphrase = None
        elif protect and not is_new:
            raise ValueError(f"{found.secret_path} exists already: --passphrase is for a new master secret")
        added = found.init(
            model, name=name, new_version=new_version, **{k: v for k, v in options.items() if v not in (None, False)}
        )
        facts = {"model": added.name, "version": added.version, "digest": added.digest, "registry": str(registry),
                 "secret": str(found.secret_path)}  # fmt: skip
        report.result(facts, f"registered {added.label}, digest {added.digest[:16]}…")
        if is_new:
            report.remark(
                f"master secret: {found.secret_path}. Back it up: without it no leak can ever be traced."
                " `stainlock clients check --backup FILE` tests a backup."
            )


@click.command("add")
@click.argument("names", nargs=-1)
@click.option("--from", "file", type=FILE, metavar="FILE.csv", help="Also add those in a file: a column client, or one"
              " name per line.")  # fmt: skip
@ledger_options
@output_options
def add(report: Report, registry: Ledger, names: tuple[str, ...], file: Path | None) -> None:
    """Add clients by name: all of NAMES, or none.

    \b
    stainlock clients add "Acme Ltd" Globex --registry clients.db
    stainlock clients add --from customers.csv --registry clients.db
    """
    wanted = [*names, *(read_names(file) if file else [])]
    added = registry.add(*wanted)
    total = registry.count()[0]
    facts = {"added": added, "clients": total}
    report.result(facts, f"added {added} client{'s' if added != 1 else ''}; the registry has {total}")


@click.command("list")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="List at most N clients.  [default: all]")
@click.option("--after", default="", metavar="NAME", help="List only names after this one.  [default: all]")
@ledger_options
@output_options
def listing(report: Report, registry: Ledger, limit: int | None, after: str) -> None:
    """List clients in order of name, and the registered models.

    \b
    stainlock clients list --registry clients.db --limit 20
    """
    found = list(registry.list(limit=limit, after=after))
    models = [{"model": m.name, "version": m.version, "digest": m.digest, "added": m.added} for m in registry.models()]
    total, copies = registry.count()
    facts = {"clients": [_facts(client) for client in found], "total": total, "copies": copies, "models": models}
    lines = [f"{client.name}  epoch {client.epoch}{_state(client)}" for client in found]
    report.result(facts, *(lines or ["no clients"]))
    report.remark(f"{len(found)} of {total} clients, {copies} copies issued", *(
        f"model {m['model']}@{m['version']}, digest {str(m['digest'])[:16]}…" for m in models))  # fmt: skip


def _facts(client: Client) -> dict[str, Any]:
    return {"client": client.name, "epoch": client.epoch, "added": client.added, "revoked": client.revoked}


def _state(client: Client) -> str:
    return f"  revoked {client.revoked}" if client.revoked else ""


@click.command("show")
@click.argument("name")
@ledger_options
@output_options
def show(report: Report, registry: Ledger, name: str) -> None:
    """Show a client and every copy issued to them.

    \b
    stainlock clients show Globex --registry clients.db
    """
    client, copies = registry.show(name)
    facts = {**_facts(client), "copies": [dataclasses.asdict(copy) for copy in copies]}
    lines = [f"{client.name}  epoch {client.epoch}, added {client.added}{_state(client)}"]
    for copy in copies:
        extras = " ".join(filter(None, ("stain" if copy.stain else "", f"lock {copy.lock}" if copy.lock else "")))
        lines.append(f"  {copy.label} epoch {copy.epoch}  {copy.digest[:16]}…  issued {copy.issued}  {extras}".rstrip())
    report.result(facts, *lines)


@click.command("rotate")
@click.argument("names", nargs=-1, required=True)
@ledger_options
@output_options
def rotate(report: Report, registry: Ledger, names: tuple[str, ...]) -> None:
    """Start a new epoch for clients. Their next copies and patches are new; old copies are still traced to them.

    \b
    stainlock clients rotate Globex --registry clients.db
    stainlock clients issue --client Globex --out globex-2 --lock --registry clients.db
    """
    changed = registry.rotate(*names)
    lines = [f"{client.name}  epoch {client.epoch}" for client in changed]
    report.result({"clients": [_facts(client) for client in changed]}, *lines)
    report.remark("issue their new copies with `stainlock clients issue`")


@click.command("revoke")
@click.argument("names", nargs=-1, required=True)
@ledger_options
@output_options
def revoke(report: Report, registry: Ledger, names: tuple[str, ...]) -> None:
    """Issue no more copies to clients. Existing copies keep working, and are still traced to them.

    \b
    stainlock clients revoke Globex --registry clients.db
    """
    changed = registry.revoke(*names)
    lines = [f"{client.name}  revoked {client.revoked}" for client in changed]
    report.result({"clients": [_facts(client) for client in changed]}, *lines)


@click.command("check")
@click.option("--backup", type=FILE, metavar="FILE", help="Backup of the master secret to test instead of the one"
              " in use.")  # fmt: skip
@click.option("--commitment", type=FILE, metavar="FILE.json", help="Signed commitment to the log, from `stainlock"
              " commit --registry`: check that every entry up to it is unaltered.")  # fmt: skip
@ledger_options
@output_options
def check(report: Report, registry: Ledger, backup: Path | None, commitment: Path | None) -> None:
    """Test the master secret or a backup, and every log entry.

    \b
    stainlock clients check --backup /media/safe/clients.secret --registry clients.db
    stainlock clients check --commitment log.json --registry clients.db
    """
    registry.check(backup, passphrase=asked_passphrase)
    entries, chain = registry.check_log(commitment)
    path = backup or registry.secret_path
    facts = {"secret": str(path), "fits": True, "entries": entries, "chain": chain,
             "commitment": str(commitment) if commitment else None}  # fmt: skip
    lines = [f"{path} is this registry's master secret", f"the log's {entries} entries are unaltered"]
    if commitment is not None:
        lines.append(f"{commitment} is signed, and the log is unaltered up to its entry")
    report.result(facts, *lines)
