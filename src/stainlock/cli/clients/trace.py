"""`stainlock clients trace`: whose copy is this?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.clients.options import bases_options, opened, read_names, registry_option, secret_option
from stainlock.cli.options import FILE, code_options, output_options, seed_option
from stainlock.cli.outputs import Outputs
from stainlock.cli.report import Report, chance

if TYPE_CHECKING:
    from stainlock.clients.tracing import Trace
    from stainlock.target import Target

_SHOWN = 20


@click.command("trace")
@click.argument("suspect")
@registry_option(required=False)
@secret_option
@click.option("--level", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=1e-6, show_default=True,
              help="Accepted probability of naming any innocent client.")  # fmt: skip
@click.option("--report", "page", type=FILE, metavar="FILE.html", help="Write a page for decision-makers, and beside it"
              " FILE.json for --check, which has the secrets of the named clients only.")  # fmt: skip
@click.option("--check", "evidence", type=FILE, metavar="FILE.json", help="Instead of a registry: recompute the numbers"
              " of such a file. Needs a --base for every model that it names.")  # fmt: skip
@click.option("--names", type=FILE, metavar="FILE", help="Instead of a lost registry: file with the clients' names,"
              " one per line. Needs --secret and --base.")  # fmt: skip
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="With --names: number of epochs to try.  [default: 1]",
)
@click.option("--chips", type=int, help="With --names: as for `clients init`.  [default: 16384]")
@click.option("--amplitude", type=click.FloatRange(0, 1, min_open=True, max_open=True),
              help="With --names: as for `clients init`.  [default: 0.01]")  # fmt: skip
@click.option("--blind", is_flag=True, help="Trace without the base model, if it is lost; finds much less.")
@code_options
@seed_option()
@bases_options
@output_options
def trace(
    report: Report,
    suspect: str,
    registry: Path | None,
    secret: Path | None,
    level: float,
    page: Path | None,
    evidence: Path | None,
    names: Path | None,
    epochs: int,
    chips: int | None,
    amplitude: float | None,
    blind: bool,
    bases: Callable[[], list[Target]],
    of: str | None,
) -> int:
    """Name every client who is proven to have a part in SUSPECT. Exit status 1 if there is none.

    \b
    stainlock clients trace leaked.safetensors --registry clients.db
    stainlock clients trace leaked.onnx --registry clients.db --level 1e-9 --report trace.html
    stainlock clients trace leaked --check trace.json --base mine.py:model

    SUSPECT is a bundle, a weight file (.safetensors, .pt, .pth), FILE.onnx or a torch.export program, FILE.pt2; none of
    its code is run. It may be pruned, quantised, fine-tuned, incomplete or combined from many clients' copies.
    """
    if sum((registry is not None, evidence is not None, names is not None)) != 1:
        raise ValueError("expected one of --registry FILE, --check FILE.json and --names FILE")
    if evidence is not None:
        return _check(report, suspect, evidence, bases())
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"expected --report FILE.html, got {page}")
    if names is not None:
        if page is not None or blind or of is not None:
            raise ValueError("expected --registry with --report, --blind and --of")
        options = {"epochs": epochs, "level": level, "chips": chips, "amplitude": amplitude}
        found = _by_names(suspect, names, secret, bases(), options)
        return _told(report, found, None)
    if chips is not None or amplitude is not None:
        raise ValueError("expected --names with --chips and --amplitude: a registry knows its own")
    assert registry is not None
    outputs = [page, page.with_suffix(".json")] if page is not None else []
    with opened(registry, secret) as clients, Outputs(outputs) as places:
        with report.progress("tracing") as progress:
            found = clients.trace(suspect, level=level, base=bases(), of=of, blind=blind, progress=progress)
        if page is not None:
            evidence_file = places.place(outputs[1]) if found.clients else outputs[1]
            clients.write_report(found, places.place(page), evidence_file)
        places.commit()
    return _told(report, found, page)


def _by_names(suspect: str, names: Path, secret: Path | None, bases: list[Target], options: dict[str, Any]) -> Trace:
    from stainlock.cli.clients.options import asked_passphrase
    from stainlock.clients.secrets import MasterSecret
    from stainlock.clients.tracing import trace_names

    if secret is None or len(bases) != 1:
        raise ValueError("expected --secret FILE and one --base MODEL with --names: tracing needs both")
    master = MasterSecret.load(secret, asked_passphrase)
    return trace_names(
        suspect, master, bases[0], read_names(names), **{k: v for k, v in options.items() if v is not None}
    )


def _told(report: Report, found: Trace, page: Path | None) -> int:
    facts: dict[str, Any] = found.facts() | {"report": str(page) if page else None}
    if not found.clients:
        report.result(
            facts, f"none: no client is proven to be the source ({found.tested} tested, level {found.level:g})"
        )
    else:
        several = len(found.compared) > 1
        lines = [
            f"traced: {one.client}, epoch {one.epoch}{f' of {one.model}' if several else ''}"
            f" (z = {one.z:.1f}, {chance(one)})"
            for one in found.clients[:_SHOWN]
        ]
        if len(found.clients) > _SHOWN:
            lines.append(f"and {len(found.clients) - _SHOWN} more")
        report.result(facts, *lines)
    if found.note:
        report.remark(f"note: {found.note}")
    if found.clients:
        if found.identical is not None:
            report.remark(f"it is bit for bit the copy issued to {found.identical[0]}")
        report.remark("assumes that the master secret was drawn before the suspect was made, and that only the client"
                      " had the client's copy")  # fmt: skip
    if page is not None:
        report.remark(f"report: {page}")
    return 0 if found.clients else 1


def _check(report: Report, suspect: str, evidence: Path, bases: list[Target]) -> int:
    from stainlock.clients.checking import check_evidence
    from stainlock.clients.evidence import Evidence

    checked = check_evidence(Evidence.load(evidence), suspect, *bases)
    facts = {"verdict": "confirmed" if checked.holds else "not confirmed", "clients": checked.clients,
             "checks": checked.lines}  # fmt: skip
    report.result(facts, *checked.lines, "confirmed" if checked.holds else "NOT confirmed")
    return 0 if checked.holds else 1
