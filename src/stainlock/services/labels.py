"""Converts a service's answers to class indices, the best first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stainlock.errors import FileError
from stainlock.models.class_names import class_names
from stainlock.storage.values import shown

MOST_LABELS = 10_000
_LONGEST_NAMES = 2**24  # bytes of a file of class names


@dataclass(frozen=True)
class Classes:
    """How a service names classes: by name, or by whole numbers that start at ``first``."""

    names: tuple[str, ...] = ()
    first: int = 0
    _places: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {_plain(name): i for i, name in reversed(list(enumerate(self.names)))}
        object.__setattr__(self, "_places", places)

    @staticmethod
    def of(given: Any, first: int, folder: Path) -> Classes:
        """From a template or an option: a list of names, ``imagenet``, ``cifar10``, or a file (one name per line)."""
        if given is None:
            return Classes(first=first)
        if isinstance(given, list | tuple):
            return Classes(tuple(str(name) for name in given), first)
        if given in ("imagenet", "cifar10"):
            return Classes(class_names(str(given)), first)
        path = folder / str(given)
        try:
            if path.stat().st_size > _LONGEST_NAMES:
                raise ValueError("it is too long")
            names = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise FileError(f"can't read class names {shown(path)} ({shown(why)}): expected imagenet, cifar10 or a text"
                            " file with one name per line") from error  # fmt: skip
        return Classes(tuple(name.strip() for name in names if name.strip()), first)

    def index(self, label: Any) -> int:
        """A label's class index; ValueError if it is not a label."""
        if isinstance(label, bool) or label is None:
            raise ValueError(f"expected a label, got {label!r}")
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if isinstance(label, int):
            return label - self.first
        text = _plain(str(label))
        if text in self._places:
            return self._places[text]
        if re.fullmatch(r"-?[0-9]{1,9}", text):
            return int(text) - self.first
        hint = "not a class name" if self.names else "not a whole number: say how the service names its classes"
        raise ValueError(f"{shown(repr(label))} is {hint}")


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


def by_labels(found: Any, classes: Classes) -> list[int]:
    """From one label, or a list of them, the best first."""
    labels = found if isinstance(found, list | tuple) else [found]
    if len(labels) > MOST_LABELS:
        raise ValueError(f"expected at most {MOST_LABELS} labels, got {len(labels)}")
    return [classes.index(label) for label in labels]


def by_scores(found: Any, classes: Classes) -> list[int]:
    """From scores of all classes in order, or an object with a score for each label."""
    if isinstance(found, Mapping):
        scored = [(classes.index(label), _number(score)) for label, score in found.items()]
    elif isinstance(found, Sequence) and not isinstance(found, str):
        scored = [(i, _number(score)) for i, score in enumerate(found)]
    else:
        raise ValueError(f"expected a list of scores or an object of them, got {type(found).__name__}")
    if not scored:
        raise ValueError("expected scores, got none")
    return [i for i, _ in sorted(scored, key=lambda one: -one[1])]


def by_boxes(found: Any, classes: Classes, label: str = "label", score: str = "score") -> list[int]:
    """Only the label of the box with the highest score, where an object detector's stain shows; empty without boxes."""
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ValueError(f"expected a list of boxes, got {type(found).__name__}")
    try:
        best = max(found, key=lambda box: _number(box[score]), default=None)
        return [] if best is None else [classes.index(best[label])]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"expected boxes with {shown(label)} and {shown(score)}: {shown(error)} is missing") from error


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"expected a number as score, got {shown(value)}")
    return number
