"""Journals: files of one JSON object per line, each with a checksum and synced to disk before the next is written."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from stainlock.errors import FileError
from stainlock.storage.durable import claim, make_folder, sync_folder
from stainlock.storage.values import shown

UNITS = "units.jsonl"
FORMAT, VERSION = "stainlock-sweep", 2
CHECKSUM = "checksum"


def plain(value: Any) -> Any:
    """A value after a round trip through JSON: tuples become lists, NaN and infinity become None."""
    return json.loads(json.dumps(_finite(value)))


def append_line(path: Path, facts: Mapping[str, Any]) -> None:
    """Append a line, completely or not at all, and sync it to disk before returning."""
    stored = _finite(facts)
    line = json.dumps({**stored, CHECKSUM: _checksum(stored)}).encode() + b"\n"
    try:
        make_folder(path.parent)
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                while line:  # a disk that fills up accepts a part, then refuses the rest
                    line = line[file.write(line) or 0 :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
            if before == 0:  # a new file: sync its name too
                sync_folder(path.parent)
    except OSError as error:
        raise FileError(
            f"can't write {path} ({error.strerror or error}): what was written before is kept, free space and run again"
        ) from error


def read_lines(path: Path, what: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered lines of a journal; a last line cut short by an interrupt is removed from the file.

    Version 0.1.0 wrote lines without checksums: these are accepted if no line before them has a checksum.
    """
    if not path.exists():
        return
    whole, checked = 0, False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):  # else the next line would be appended to it
                    os.truncate(path, whole)
                    return
                whole += len(line)
                facts = _parsed(path, number, line, what)
                if CHECKSUM in facts:
                    checked = True
                elif checked:
                    raise damaged(path, number, what, "it has no checksum, unlike those before it")
                yield number, {name: value for name, value in facts.items() if name != CHECKSUM}
    except OSError as error:
        raise FileError(f"can't read {path}: {error.strerror or error}") from error


def _checksum(facts: Mapping[str, Any]) -> str:
    """sha256 of the line without its checksum."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def damaged(path: Path, number: int, what: str, why: object) -> FileError:
    return FileError(f"{path} line {number} is not {what} ({' '.join(str(why).split())[:200]}): remove it, or the file")


def _parsed(path: Path, number: int, line: bytes, what: str) -> dict[str, Any]:
    try:
        facts = json.loads(line)
        if not isinstance(facts, dict):
            raise ValueError(f"it is a {type(facts).__name__}")
        rest = {name: value for name, value in facts.items() if name != CHECKSUM}
        if CHECKSUM in facts and facts[CHECKSUM] != _checksum(rest):
            raise ValueError("its checksum does not match, it was altered after it was written")
    except (ValueError, RecursionError) as error:
        raise damaged(path, number, what, error) from error
    return facts


class Journal:
    """The finished units of one sweep, with their rows, in a folder that no other run can write to meanwhile.

    The first line identifies the sweep, so results of different sweeps are never mixed.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / UNITS
        self.identity: dict[str, Any] = plain(identity)
        self.done: set[str] = set()

    def __enter__(self) -> Journal:
        folder = self.path.parent
        try:
            make_folder(folder)
            self._claimed = self.path.open("ab")
        except OSError as error:
            raise FileError(f"can't write {self.path}: {error.strerror or error}") from error
        try:
            claim(self._claimed, f"another run is writing to {folder}: wait for it, or choose another folder")
            self.done = {name for name, _ in self.entries()}
            if not self.path.stat().st_size:
                append_line(self.path, {"format": FORMAT, "version": VERSION, "identity": self.identity})
        except BaseException:
            self._claimed.close()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._claimed.close()

    def append(self, unit: str, rows: list[dict[str, Any]]) -> None:
        append_line(self.path, {"unit": unit, "rows": rows})
        self.done.add(unit)

    def entries(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Every unit that is done, with its rows."""
        for number, facts in read_lines(self.path, "a unit of a sweep"):
            if number == 1:
                self._check(facts)
            elif isinstance(facts.get("unit"), str) and isinstance(facts.get("rows"), list):
                yield facts["unit"], facts["rows"]
            else:
                raise damaged(self.path, number, "a unit of a sweep", "expected its unit and rows")

    def _check(self, first: dict[str, Any]) -> None:
        folder = self.path.parent
        if first.get("format") != FORMAT or not isinstance(first.get("identity"), dict):
            raise FileError(f"{self.path} is not a journal of stainlock: choose another folder")
        if first.get("version") not in (1, VERSION):
            raise FileError(
                f"{self.path} has version {shown(first.get('version'))}, this program reads {VERSION}: update stainlock"
            )
        theirs = first["identity"]
        for name in [*self.identity, *theirs]:
            if theirs.get(name) != self.identity.get(name):
                raise FileError(
                    f"{folder} has results of another sweep ({shown(name)} was {_short(theirs.get(name))}, is"
                    f" {_short(self.identity.get(name))}): choose another folder, or remove it"
                )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
