"""JSON files with a format name and a version, read with a clear error for whatever is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from stainlock.errors import FileError
from stainlock.storage.values import shown

DEEPEST = 32  # levels of nested lists and objects
_LONGEST_RECORD = 2**24  # bytes


def parse_json(text: bytes | str) -> Any:
    """Parsed JSON; ValueError for whatever is wrong with it, including deep nesting and duplicate names."""
    try:
        return json.loads(text, object_pairs_hook=_named_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a duplicate name")
    return found


def depth_of(value: Any) -> int:
    """How deeply lists and objects are nested, computed without recursion."""
    deepest, waiting = 0, [(value, 0)]
    while waiting:
        found, depth = waiting.pop()
        if isinstance(found, dict | list):
            deepest = max(deepest, depth + 1)
            waiting += [(part, depth + 1) for part in (found.values() if isinstance(found, dict) else found)]
    return deepest


def read_json(path: Path, what: str) -> Any:
    """The content of a JSON file; `FileError` if it can't be read, is too large or too deeply nested."""
    try:
        if path.stat().st_size > _LONGEST_RECORD:
            raise FileError(f"{path} is not a {what}: it has {path.stat().st_size} bytes, expected at most"
                            f" {_LONGEST_RECORD}")  # fmt: skip
        found = parse_json(path.read_bytes())
        if depth_of(found) > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    except OSError as error:
        raise FileError(f"can't read {what} {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise FileError(f"{path} is not a {what}, or is truncated: expected JSON ({error})") from error
    return found


def read_record(
    path: str | Path,
    what: str,
    format: str,
    version: int,
    fields: Collection[str],
    *,
    older: Mapping[int, Mapping[str, Any]] | None = None,
    found: Any = None,
) -> dict[str, Any]:
    """The facts of a JSON file with this format, version and exactly these fields; else `FileError`.

    ``older`` lists older versions that are read too, each with values for the fields it did not have. ``found`` is the
    already parsed content, if it is part of another file.
    """
    facts = read_json(Path(path), what) if found is None else found
    if not isinstance(facts, dict) or facts.get("format") != format:
        raise FileError(f"{path} is not a stainlock {what}")
    known = older or {}
    if not isinstance(facts.get("version"), int):
        raise FileError(f"{path} is not a complete {what}: expected a number as version")
    if facts.get("version") in known:
        facts = {**known[facts["version"]], **facts}
    elif facts.get("version") != version:
        raise FileError(
            f"{path} has {what} version {shown(facts.get('version'))}, this program reads {version}: update stainlock"
        )
    if wrong := sorted(set(fields).symmetric_difference(facts)):
        raise FileError(f"{path} is not a complete {what}: {shown(wrong[0])} is missing or unknown")
    return facts


def canonical(facts: Mapping[str, Any]) -> bytes:
    """The facts as JSON in one canonical form: names sorted, no spaces, ASCII."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
