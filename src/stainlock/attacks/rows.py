"""The table of results: one row per attack and strength, saved as soon as it is measured."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stainlock.attacks.attack import NEEDS, Strength
from stainlock.errors import FileError
from stainlock.storage.checks import check_row
from stainlock.storage.durable import claim, make_folder, write_file
from stainlock.sweeps.journal import append_line, damaged, plain, read_lines

ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Row:
    """How much of a stain or a lock survived an attack.

    ``performance`` is that of the thief's model; for a lock, without the owner's trigger. ``unlocked`` is the
    performance of a lock with the owner's trigger. ``verdict`` of a stain is stained or not, by the smallest p-value in
    ``by`` (one entry per verification), corrected for their number. For a lock it is opened or locked: opened if the
    thief's performance is nearer to the unlocked one than to the locked one. ``trigger_response`` is the response of
    the detector found in the suspect, as a unit vector, relative to the original response. ``images`` is the number of
    images the thief used, ``seconds`` the time the attack took. ``applied`` is false if the attack did not apply;
    ``note`` says why.
    """

    attack: str
    strength: Strength
    group: str
    kind: str
    applied: bool = True
    verdict: str | None = None
    p_value: float | None = None
    log10_p_value: float | None = None
    by: dict[str, dict[str, Any]] = field(default_factory=dict)
    trigger_response: float | None = None
    metric: str | None = None
    performance: float | None = None
    unlocked: float | None = None
    needs: str = "nothing"
    images: int = 0
    seconds: float = 0.0
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    picture: str | None = None
    identity: str = ""  # hash of the model, key, data, seed and number of decoys

    def flat(self) -> dict[str, Any]:
        """One level, for CSV: adds ``log10_p_weights``, ``log10_p_response``, ``log10_p_output`` and every figure."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("by", "figures")}
        methods = {
            f"log10_p_{name}": self.by.get(name, {}).get("log10_p_value") for name in ("weights", "response", "output")
        }
        return facts | methods | self.figures


def thefts(rows: Sequence[Row]) -> list[Row]:
    """A thief's attacks on a lock that have a verdict."""
    return [row for row in rows if row.group == "thief" and row.verdict is not None]


def ways_in(rows: Sequence[Row]) -> list[Row]:
    """Attacks that open a lock, cheapest first (by what the thief needs, then by time); one row per attack."""
    opened = [row for row in thefts(rows) if row.verdict == "opened"]
    first: dict[str, Row] = {}
    for row in sorted(opened, key=lambda row: (NEEDS.index(row.needs), row.seconds)):
        first.setdefault(row.attack, row)
    return list(first.values())


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a results folder."""
    try:
        make_folder(folder)
        file = (folder / ROWS).open("ab")
    except OSError as error:
        raise FileError(f"can't write {folder / ROWS}: {error.strerror or error}") from error
    with file:
        claim(file, f"another run is writing to {folder}: wait for it, or choose another folder")
        yield


def append_row(folder: Path, row: Row) -> None:
    """Appends a row and flushes it to disk."""
    append_line(folder / ROWS, dataclasses.asdict(row))


def read_rows(folder: Path) -> list[Row]:
    """Every row in a folder, the latest if one was measured twice; a line cut short by an interrupt is skipped."""
    path, what = folder / ROWS, "a row of results"
    rows: dict[tuple[str, str, str], Row] = {}
    for number, facts in read_lines(path, what):
        try:
            row = Row(**facts)
            check_row(dataclasses.asdict(row))
        except (TypeError, ValueError, KeyError) as error:
            raise damaged(path, number, what, error) from error
        rows[row.attack, str(row.strength), row.identity] = row
    return list(rows.values())


def write_tables(folder: Path, rows: Iterable[Row]) -> None:
    """Writes ``results.csv`` and ``results.json`` beside the rows."""
    rows = list(rows)
    flat = [row.flat() for row in rows]
    columns = list(dict.fromkeys(name for facts in flat for name in facts))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_file(folder / "results.csv", text.getvalue().encode())
    facts = {"rows": [plain(dataclasses.asdict(row)) for row in rows]}
    write_file(folder / "results.json", (json.dumps(facts, indent=1) + "\n").encode())
