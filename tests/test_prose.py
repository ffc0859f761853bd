"""Texts are for people: no branch depends on the wording of an error, a reason or a note."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import stainlock

PACKAGE = Path(stainlock.__file__).parent
NAMES = "error|exception|problem|reason|why|note|message|told|known_from|stop"
TEXT = re.compile(rf"(str\(.*\b({NAMES})\)|(\w+[._])*({NAMES})s?)(\.\w+\(\))*")
# Other packages say only in their messages what went wrong.
OF_OTHERS = {"models/torchvision_import.py", "sweeps/ray_workers.py"}


def read_texts(source: str) -> Iterator[str]:
    """The places where code looks for words in a text."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=ast.Constant(value=str()), ops=[ast.In() | ast.NotIn()], comparators=[where]):
                pass
            case ast.Compare(left=where, ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=str(words))]):
                if not words.strip():  # whether there is a text at all
                    continue
            case ast.Call(func=ast.Attribute(value=where, attr="startswith" | "endswith" | "find" | "index")):
                pass
            case _:
                continue
        if TEXT.fullmatch(ast.unparse(where)):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_branch_reads_a_text() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): places
        for path in PACKAGE.rglob("*.py")
        if (places := list(read_texts(path.read_text(encoding="utf-8"))))
    }
    assert found.keys() == OF_OTHERS, found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if 'output' in str(error): pass", True), ("if 'gates' not in site.why: pass", True),
        ("x = problem.startswith('at')", True), ("if target.known_from == 'guessed': pass", True),
        ("if str(error).lower().endswith('.'): pass", True), ("if why == '': pass", False),
        ("if name.startswith('at'): pass", False), ("if 'weight' in tensors: pass", False),
    ],
)  # fmt: skip
def test_such_places_are_found(code: str, found: bool) -> None:
    assert bool(list(read_texts(code))) is found
