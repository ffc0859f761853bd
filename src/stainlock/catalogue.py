"""Collects what the files of a package define, by name: a new attack or figure is one file, with no list to update."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar


class Offered(Protocol):
    """Something with a unique name, in a group."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> str: ...


Item = TypeVar("Item", bound=Offered)


def collected(package: str, kind: type[Item], attributes: Sequence[str], groups: Sequence[str]) -> dict[str, Item]:
    """Every item that modules of the package and its subpackages hold under these attributes, alone or in a sequence.

    Sorted by group, in the order of ``groups``; by file within each group.
    """
    found: list[Item] = []
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        loaded = importlib.import_module(module.name)
        for attribute in attributes:
            held: Any = loaded.__dict__.get(attribute, ())
            found += [held] if isinstance(held, kind) else held
    by_name = {item.name: item for item in sorted(found, key=lambda item: groups.index(item.group))}
    if len(by_name) != len(found):
        raise ValueError(f"expected unique names, got {sorted(item.name for item in found)}")
    return by_name
