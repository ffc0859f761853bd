"""Answers for a probe's pictures: CSV or JSON, with labels, top-k, scores or boxes.

CSV has a column ``file`` and either ``label`` (or ``label1``, ``label2``, …, the best first; or several labels
separated by |) or one column of scores per class. JSON is an object from file names to answers, or a list of objects
with ``file``; an answer is a label, a list of labels, or an object with ``label``, ``labels``, ``scores`` or ``boxes``
(each with ``label`` and ``score``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stainlock.errors import FileError
from stainlock.services.labels import Classes, by_boxes, by_labels, by_scores
from stainlock.storage.records import read_json
from stainlock.storage.values import shown

_MOST_BYTES = 2**28
Given = dict[str, list[int] | None]  # file name to labels, the best first; None if there was no answer


def read_answers(path: Path, classes: Classes | None = None) -> Given:
    """Answers by picture. Any problem with the file raises a one-line error that says where it is."""
    classes = Classes() if classes is None else classes
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return _from_csv(path, classes)
    if suffix == ".json":
        return _from_json(path, classes)
    raise ValueError(f"expected --answers FILE.csv or FILE.json, got {path}")


def _from_csv(path: Path, classes: Classes) -> Given:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise FileError(f"{path} is too long for answers: {path.stat().st_size} bytes")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            columns, rows = list(reader.fieldnames or []), list(reader)
    except OSError as error:
        raise FileError(f"can't read answers {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path} can't be read as CSV ({error}): expected file,label lines") from error
    if "file" not in columns or len(columns) < 2:
        raise FileError(f"{path}: expected file,label as the first line, got {shown(','.join(columns)) or 'nothing'}")
    others = [c for c in columns if c != "file"]
    ranked = sorted((c for c in others if re.fullmatch(r"label[0-9]{0,5}", c)), key=lambda c: int(c[5:] or 0))
    given: Given = {}
    for number, row in enumerate(rows, start=2):
        cells = [(row[c] or "").strip() for c in (ranked or others)]
        try:
            if not any(cells):
                labels = None
            elif ranked:
                labels = by_labels([part for cell in cells for part in cell.split("|") if part.strip()], classes)
            else:
                labels = by_scores(dict(zip(others, cells, strict=True)), classes)
        except ValueError as error:
            raise FileError(f"{path} line {number}: {error}") from error
        _put(given, str(row["file"] or ""), labels, f"{path} line {number}")
    return given


def _from_json(path: Path, classes: Classes) -> Given:
    found = read_json(path, "file of answers")
    if isinstance(found, list):
        if not all(isinstance(one, Mapping) and "file" in one for one in found):
            raise FileError(f"{path}: expected objects with file and an answer")
        pairs = [(str(one["file"]), {k: v for k, v in one.items() if k != "file"}) for one in found]
    elif isinstance(found, Mapping):
        pairs = [(str(name), answer) for name, answer in found.items()]
    else:
        raise FileError(f"{path}: expected an object from file names to answers, or a list of objects with file")
    given: Given = {}
    for name, answer in pairs:
        try:
            labels = _labels(answer, classes)
        except (ValueError, TypeError) as error:
            raise FileError(f"{path}, {shown(name)}: {error}") from error
        _put(given, name, labels, f"{path}, {shown(name)}")
    return given


def _labels(answer: Any, classes: Classes) -> list[int] | None:
    if answer is None:
        return None
    if not isinstance(answer, Mapping):
        return by_labels(answer, classes)
    for name, read in (("label", by_labels), ("labels", by_labels), ("scores", by_scores), ("boxes", by_boxes)):
        if name in answer:
            return None if answer[name] is None else read(answer[name], classes)
    raise ValueError(f"expected label, labels, scores or boxes, got {shown(', '.join(map(str, answer))) or 'nothing'}")


def _put(given: Given, name: str, labels: list[int] | None, where: str) -> None:
    name = re.split(r"[\\/]", name)[-1]  # pictures may be named with their folder
    if name in given:
        raise FileError(f"{where}: {shown(name)} is answered twice")
    given[name] = labels
