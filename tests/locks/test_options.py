"""Options of locks: typed, with the same names in every kind of lock, and old spellings on the command line."""

from __future__ import annotations

import inspect
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from stainlock.cli.lock import command
from stainlock.locks.lock import KINDS, LockOptions, lock

SHARED = {"target", "seed", "progress"}


def members(annotation: Any) -> set[Any]:
    """The types that a union is made of."""
    union = get_origin(annotation) in (Union, types.UnionType)
    return set(get_args(annotation)) if union else {annotation}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kinds_options_are_declared_with_their_types(kind: str) -> None:
    declared, own = get_type_hints(LockOptions), get_type_hints(KINDS[kind])
    for name in inspect.signature(KINDS[kind]).parameters.keys() - SHARED:
        assert members(own[name]) <= members(declared[name]), name


def test_every_declared_option_is_one_of_some_kind() -> None:
    taken = {name for function in KINDS.values() for name in inspect.signature(function).parameters}
    assert set(LockOptions.__annotations__) == taken - SHARED


@pytest.mark.parametrize("function", [lock, *KINDS.values()])
def test_everything_but_the_target_is_given_by_keyword(function: Any) -> None:
    first, *others = inspect.signature(function).parameters.values()
    assert first.name == "target"
    assert {p.kind for p in others} <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def test_the_command_line_understands_the_old_spellings() -> None:
    files = ["model", "--out", "locked", "--key", "key"]
    old, new = (
        command.make_context("lock", [*files, *options]).params
        for options in (
            ["--detectors", "2", "--tries=3", "--scale", "1.5"],
            ["--count", "2", "--restarts=3", "--strength", "1.5"],
        )
    )
    assert old == new
    assert (new["count"], new["restarts"], new["strength"]) == (2, 3, 1.5)
