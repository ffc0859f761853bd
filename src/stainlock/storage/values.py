"""Checks of single values in files, made before they are used: texts, numbers, lists of them.

Each check raises ValueError with what was expected and what was found; readers add the file's name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

LONGEST_NAME = 300  # characters
FARTHEST = 2**48  # upper limit on an element's index: larger than any tensor, and sums of indices don't overflow


def check_one_of(facts: Mapping[str, Any], name: str, known: tuple[str, ...]) -> None:
    expect(isinstance(facts[name], str) and facts[name] in known, f"{' or '.join(known)} as {name}", facts[name])


def check_wholes(values: Any, name: str, least: int = 0) -> None:
    expect(isinstance(values, list | tuple) and len(values) <= 8, f"a few whole numbers as {name}", values)
    for value in values:
        check_whole(value, name, least)


def check_whole(value: Any, name: str, least: int, most: int = FARTHEST) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    upwards = "" if most == FARTHEST else f" to {most}"
    expect(whole, f"a whole number from {least}{upwards} as {name}", value)


def check_number(value: Any, name: str) -> None:
    finite = _is_number(value) and abs(value) <= sys.float_info.max  # integers in JSON can be larger
    expect(finite, f"a finite number as {name}", value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_text(value: Any, name: str) -> None:
    """A name on one line."""
    expect(isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable(), f"text as {name}", value)


def shown(value: object) -> str:
    """A value as short printable text for an error message, whatever it contains."""
    text = str(value) if isinstance(value, int | float) or str(value).isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def expect(holds: bool, what: str, came: object) -> None:
    if not holds:
        raise ValueError(f"expected {what}, got {shown(came)}")
