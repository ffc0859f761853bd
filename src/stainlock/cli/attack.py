"""`stainlock attack`: what remains of a stain or a lock after attacks, as a table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stainlock.cli.coalitions import attack_members, coalition_options
from stainlock.cli.help import Verb
from stainlock.cli.options import FILE, Code, code_options, load_model, output_options, seed_option, weights_option
from stainlock.cli.report import Report, rounded

if TYPE_CHECKING:
    from rich.table import Table

    from stainlock.attacks.rows import Row

MOST_IMAGES = 1000

# How the figures of an attack's row are printed; JSON and CSV have their names.
_FIGURES = {
    "delta": "change of the response",
    "bound": "bound on false positives",
    "bound_cap": "exact bound",
    "observed": "false positives seen",
    "forger_log10_p": "log10 of the forger's p",
    "of": "of rows",
    "own": "rows of the lock",
}


@click.command("attack", cls=Verb)
@click.argument("model", required=False)
@click.option("--key", "key_file", type=FILE, metavar="FILE", help="The owner's key.")
@click.option("--data", type=FILE, metavar="DIR", help="Images, labelled if performance is to be measured. The thief"
              " gets half of them; the other half evaluates the result.")  # fmt: skip
@click.option("--attack", "names", multiple=True, metavar="NAME", help="Attack to run; repeat for several.  [default:"
              " all that apply to this kind of key]")  # fmt: skip
@click.option(
    "--strength",
    "strengths",
    multiple=True,
    metavar="S",
    help="Strength to use instead of the attack's own; repeat for several.",
)
@click.option("--list", "listed", is_flag=True, help="List the attacks and what they need, and exit.")
@click.option("--out", type=FILE, metavar="DIR", help="Folder that keeps each row as it is measured, with results.csv,"
              " .json and .png. After an interrupt, the same command resumes.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=2), default=MOST_IMAGES, show_default=True, metavar="N",
              help="Use at most N images, evenly spaced over the folder.")  # fmt: skip
@coalition_options
@code_options
@weights_option
@seed_option("Seed for sharing out the images, for the attacks' noise and for random weights.  [default: 0]")
@output_options
def command(
    report: Report,
    model: str | None,
    key_file: Path | None,
    data: Path | None,
    names: tuple[str, ...],
    strengths: tuple[str, ...],
    listed: bool,
    out: Path | None,
    limit: int,
    weights: str | None,
    seed: int | None,
    code: Code,
    members: tuple[int, ...],
    then: tuple[str, ...],
    **fingerprints: Any,
) -> None:
    """Attack MODEL and measure what remains of its stain or lock.

    With --members, clients with fingerprinted copies of MODEL combine them, and each row says whom a trace names.

    Each row has the attack and its strength, the model's performance afterwards and what the thief needed. For a stain
    it adds each verification's verdict and p-value and the trigger's response; for a lock, the performance without and
    with the trigger.
    """
    from stainlock.attacks.rows import thefts, ways_in
    from stainlock.attacks.run import attack, check_names
    from stainlock.evaluation import Images
    from stainlock.key import Key

    if listed:
        _list(report)
        return
    if members:
        if key_file is not None or strengths or out is not None:
            raise ValueError("expected none of --key, --strength and --out with --members: save the rows with --json")
        if model is None:
            raise ValueError("expected MODEL, got none")
        target = load_model(model, weights, seed, code)
        attack_members(report, target, data, names, then, seed or 0, limit, members=members, **fingerprints)
        return
    if then or any(value is not None for value in fingerprints.values()):
        raise ValueError("expected --members K with --then, --clients, --amplitude and --chips")
    for option, value in (("MODEL", model), ("--key FILE", key_file), ("--data DIR", data)):
        if value is None:
            raise ValueError(f"expected {option}, got none")
    assert model is not None
    assert key_file is not None
    assert data is not None
    check_names(names)
    key = Key.load(key_file)
    images = Images.from_folder(data)
    target = load_model(model, weights, seed, code)
    done: list[Row] = []

    def finished(row: Row) -> None:
        done.append(row)
        report.remark(_line(row))

    try:
        with report.progress("attacking") as progress:
            rows = attack(
                target, key, images, names=names or None, strengths=[_number(s) for s in strengths] or None, out=out,
                seed=seed or 0, limit=limit, progress=progress, finished=finished,
            )  # fmt: skip
    except KeyboardInterrupt:
        kept = f"kept in {out}: the same command resumes there" if out else "lost: --out DIR would keep them"
        report.remark(f"{len(done)} rows were measured, {kept}" if done else "no row was measured yet")
        raise
    facts: dict[str, Any] = {"rows": [dataclasses.asdict(row) for row in rows], "images": min(limit, len(images))}
    if key.kind == "lock":
        facts |= {"opened_by": [row.attack for row in ways_in(rows)], "not_run": _not_run(rows)}
    report.result(facts | {"out": None if out is None else str(out)}, _table(rows))
    if key.kind == "lock" and thefts(rows):
        cheap = ", ".join(facts["opened_by"])
        tried, others = len({row.attack for row in thefts(rows)}), _not_run(rows)
        told = f"none of the {tried} thief's attacks that were run opened it"
        report.remark(f"opened by (cheapest first): {cheap}" if cheap else told)
        if others:
            report.remark(f"not run, so untested: {', '.join(others)}")
    if out is not None:
        report.remark(f"wrote {out / 'results.csv'}, results.json and results.png beside it")


def _not_run(rows: list[Row]) -> list[str]:
    """The thief's attacks on locks that this run did not or could not make."""
    from stainlock.attacks import all_attacks
    from stainlock.attacks.rows import thefts

    made = {row.attack for row in thefts(rows)}
    return [a.name for a in all_attacks().values() if a.group == "thief" and "lock" in a.against and a.name not in made]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _list(report: Report) -> None:
    from rich import box
    from rich.table import Table

    from stainlock.attacks import all_attacks, all_collusions

    found = list(all_attacks().values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("attack", "group", "against", "needs", "strengths", "what it is"):
        table.add_column(column)
    for one in found:
        strengths = ", ".join(map(str, one.strengths))
        table.add_row(one.name, one.group, " and ".join(one.against), one.needs, strengths, one.about)
    facts = [
        {"attack": a.name, "group": a.group, "against": list(a.against), "needs": a.needs,
         "strengths": list(a.strengths), "about": a.about}
        for a in found
    ]  # fmt: skip
    for collusion in all_collusions().values():
        table.add_row(collusion.name, collusion.group, "fingerprint", "copies", "members", collusion.about)
        facts.append({"attack": collusion.name, "group": collusion.group, "against": ["fingerprint"], "needs": "copies",
                      "strengths": [], "about": collusion.about})  # fmt: skip
    report.result({"attacks": facts}, table)


def _line(row: Row) -> str:
    return "  ".join(part for part in (f"{row.attack} {row.strength}:", *_cells(row)[2:]) if part)


def _cells(row: Row) -> list[str]:
    """A row's printed cells; missing values are left empty."""

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    looked = {name: facts for name, facts in row.by.items() if facts["p_value"] is not None}
    chances = {name: f"{rounded(facts['p_value'], facts['log10_p_value'])} by {name}" for name, facts in looked.items()}
    figures = ", ".join(f"{_words(name)} {value:.3g}" for name, value in row.figures.items() if value is not None)
    response = "" if row.trigger_response is None else f"{row.trigger_response:.2f}"
    needed = f"{row.seconds:.0f} s" + (f", {row.images} {row.needs}" if row.images else "")
    return [
        row.attack, str(row.strength), row.verdict or ("not applicable" if not row.applied else ""),
        ", ".join(chances.values()), response, percent(row.performance), percent(row.unlocked),
        needed if row.applied else "", "; ".join(filter(None, (row.note, figures))),
    ]  # fmt: skip


def _words(figure: str) -> str:
    return _FIGURES.get(figure, figure.replace("_", " "))


def _table(rows: list[Row]) -> Table:
    from rich import box
    from rich.table import Table

    lock = any(row.kind == "lock" for row in rows)
    columns = ["attack", "strength", "verdict", "p at most", "response", "performance", "unlocked", "needed", "notes"]
    empty = {"p at most", "response"} if lock else {"unlocked"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    kept = [index for index, column in enumerate(columns) if column not in empty]
    for index in kept:
        table.add_column(columns[index])
    for row in rows:
        cells = _cells(row)
        table.add_row(*(cells[index] for index in kept))
    return table
