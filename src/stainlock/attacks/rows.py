"""The table of results: one row an attack and strength, kept from the moment it is measured."""

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
    """What an attack left of a stain or a lock.

    ``performance`` is the model's as the thief has it: for a lock without the owner's trigger. ``unlocked`` is what a
    lock's owner gets with it. ``verdict`` is stained or not, by the best of ``by`` (each verification's own p-value),
    or, for a lock, whether the thief's model is opened: nearer to the unlocked performance than to the locked one.
    ``trigger_response`` is that of the stained row's detector, as a unit vector, over what it was. ``images`` is how
    many the thief used, ``seconds`` how long it took. ``applied`` is false where the attack could not be made; ``note``
    says why.
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
    identity: str = ""  # of the model, the key, the data and the seed

    def flat(self) -> dict[str, Any]:
        """One level, for CSV and people: ``p_weights``, ``p_response``, ``p_output`` and every figure by its name."""
        facts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("by", "figures")}
        methods = {
            f"log10_p_{name}": self.by.get(name, {}).get("log10_p_value") for name in ("weights", "response", "output")
        }
        return facts | methods | self.figures


def thefts(rows: Sequence[Row]) -> list[Row]:
    """A thief's attacks on a lock that could be made and judged."""
    return [row for row in rows if row.group == "thief" and row.verdict is not None]


def ways_in(rows: Sequence[Row]) -> list[Row]:
    """What opens a lock, the cheapest first: by what the thief needs, then by his time; of each attack its cheapest."""
    opened = [row for row in thefts(rows) if row.verdict == "opened"]
    first: dict[str, Row] = {}
    for row in sorted(opened, key=lambda row: (NEEDS.index(row.needs), row.seconds)):
        first.setdefault(row.attack, row)
    return list(first.values())


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder of results."""
    try:
        make_folder(folder)
        file = (folder / ROWS).open("ab")
    except OSError as error:
        raise FileError(f"can't write {folder / ROWS}: {error.strerror or error}") from error
    with file:
        claim(file, f"another run is writing to {folder}: wait for it, or choose another folder")
        yield


def append_row(folder: Path, row: Row) -> None:
    """Onto the disk before anything else happens."""
    append_line(folder / ROWS, dataclasses.asdict(row))


def read_rows(folder: Path) -> list[Row]:
    """Every row in a folder, the latest where one was measured again; a line cut short by an interrupt is left out."""
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
    """``results.csv`` and ``results.json`` beside the rows."""
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
