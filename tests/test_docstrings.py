"""Every public name, and every public method of a public class, has a docstring with an example that runs."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import stainlock as sl

NAMES = sorted(sl.__all__)


def documented(name: str) -> Iterator[tuple[str, str]]:
    """A public name and its public methods, with their docstrings; what a class inherits belongs to its base."""
    thing = getattr(sl, name)
    yield name, own_docstring(thing)
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            value = getattr(value, "fget", getattr(value, "__func__", value))  # properties, static and class methods
            if not method.startswith("_") and inspect.isfunction(value):
                yield f"{name}.{method}", own_docstring(value)


def own_docstring(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


@pytest.fixture(scope="module")
def session() -> dict[str, Any]:
    """The names that examples start from: those of the session in the package's docstring."""
    names: dict[str, Any] = {}
    run(sl.__doc__ or "", names, "stainlock")
    return names


def run(docstring: str, names: dict[str, Any], title: str) -> None:
    told: list[str] = []
    test = doctest.DocTestParser().get_doctest(docstring, names, title, None, 0)
    failures, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append, clear_globs=False)
    names.update(test.globs)
    assert not failures, "".join(told)


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_public_name_run(
    name: str, session: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for title, docstring in documented(name):
        assert ">>> " in docstring, f"{title} has no example"
        assert not docstring.startswith((">>>", f"{title}(")), f"{title} is not described"
        folder = tmp_path / title
        write_photographs(folder / "photographs")
        monkeypatch.chdir(folder)
        run(docstring, dict(session), title)


def write_photographs(folder: Path) -> None:
    folder.mkdir(parents=True)
    labels = {"cat": 3, "dog": 5, "plane": 0, "truck": 9}
    levels = np.random.default_rng(0).integers(0, 256, (len(labels), 40, 48, 3), np.uint8)
    for image, name in zip(levels, labels, strict=True):
        Image.fromarray(image).save(folder / f"{name}.png")
    lines = ["file,class_index", *(f"{name}.png,{label}" for name, label in labels.items())]
    (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
