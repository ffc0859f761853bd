"""What an operation does, and what a batch norm computes, is written in one file each."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import stainlock
from stainlock.network.ops import ACTIVATIONS, TABLE

PACKAGE = Path(stainlock.__file__).parent
OPERATIONS = {"iadd", "add_", "imul", "concat", "adaptive_avg_pool2d", "max_pool2d", "avg_pool2d", "getitem",
              "stochastic_depth", "DropPath", "constant_pad_nd", "flatten", "reshape", "chunk"}  # fmt: skip
WITH_WEIGHTS = {"Linear", "Conv2d", "Conv3d", "ConvTranspose2d", "LayerNorm", "GroupNorm", "RMSNorm"}
WITHOUT_WEIGHTS = {module.__name__ for rule in TABLE for module in rule.modules} - WITH_WEIGHTS
CLASSES = WITHOUT_WEIGHTS | {"ReLU", "ReLU6", "LeakyReLU", "GELU", "SiLU", "Sigmoid", "Tanh", "Hardtanh", "Hardswish"}
STATISTICS = re.compile(r"running_(mean|var)")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def strings(path: Path) -> tuple[str, ...]:
    """String constants in code, without docstrings."""
    nodes = list(ast.walk(tree_of(path)))
    documentation = {
        id(node.body[0].value) for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    constants = (n for n in nodes if isinstance(n, ast.Constant) and id(n) not in documentation)
    return tuple(n.value for n in constants if isinstance(n.value, str))


def test_operations_are_named_in_the_table_alone() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names for path in PACKAGE.rglob("*.py")
        if (names := OPERATIONS & set(strings(path)))
    }  # fmt: skip
    assert found.keys() == {"network/ops.py"}, found


def test_what_activations_do_is_decided_in_the_table_alone() -> None:
    """Others ask an `Activation`, and do not compare its name. Readers of foreign files translate their names."""
    found = {
        path.relative_to(PACKAGE).as_posix(): names for path in PACKAGE.rglob("*.py")
        if (names := {*ACTIVATIONS, "leaky_relu"} & set(strings(path)))
    }  # fmt: skip
    assert {name for name in found if not name.startswith("models/")} == {"network/ops.py"}, found


def classes_tested_for(path: Path) -> set[str]:
    """The classes of torch.nn that ``isinstance`` is called with."""
    calls = (n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call))
    tests = (call.args[1] for call in calls if ast.unparse(call.func) == "isinstance")
    return {n.attr for test in tests for n in ast.walk(test) if isinstance(n, ast.Attribute)}


def test_operations_without_weights_are_told_apart_in_the_table_alone() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names for path in PACKAGE.rglob("*.py")
        if (names := CLASSES & classes_tested_for(path))
    }  # fmt: skip
    # timm's blocks have an Identity in place of a part that they lack.
    assert found.keys() == {"network/ops.py", "locks/vit/find.py"}, found


def test_running_statistics_are_computed_with_in_one_file() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
        if any(STATISTICS.search(text) for text in strings(path))
    }  # fmt: skip
    # Attacks play the thief and compute statistics themselves.
    assert {name for name in found if not name.startswith("attacks/")} == {"network/norms.py"}
