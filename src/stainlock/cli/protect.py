"""`stainlock protect`: a whole release from one settings file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, output_options, tell_conventions
from stainlock.cli.report import Report

if TYPE_CHECKING:
    from stainlock.releases import Made


@click.command("protect", cls=Verb)
@click.argument("config", type=FILE)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Make the run repeatable, including its secrets."
              " Leave it out for real protection.")  # fmt: skip
@output_options
def command(report: Report, config: Path, seed: int | None) -> None:
    """Make a whole release from CONFIG, a TOML file.

    Stains, locks, certifies and commits, and writes a client kit and a report. After an interrupt, the same command
    resumes; finished steps are kept. Changed settings or weights are refused. Paths in CONFIG are relative to it.
    """
    from stainlock.releases import protect, read_config

    settings = read_config(config)
    if seed is not None:
        settings = dataclasses.replace(settings, seed=seed)

    def finished(made: Made) -> None:
        report.remark(f"{made.step:8} {made.out or '-'}{f'  ({made.note})' if made.note else ''}")

    done = protect(settings, finished=finished, loaded=tell_conventions)
    steps = [dataclasses.asdict(made) for made in done]
    report.result({"steps": steps, "out": str(settings.out)}, f"protected: {settings.out / 'report.html'}")
    if (settings.out / "client").exists():
        report.remark(f"ship {settings.out / 'client'}; report.html lists what to keep secret")
