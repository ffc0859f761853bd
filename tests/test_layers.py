"""The direction of imports: each part of the library may use those listed before it, and no others."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import stainlock

# From the lowest to the highest. A new module or package takes its place here.
LAYERS = (
    # Independent of models
    "errors", "numerics", "sphere", "catalogue", "storage", "html", "sweeps",
    # A model, blocks inserted into it, and data
    "target", "excitation", "gating", "insertion", "plan", "models", "data", "fingerprints", "exports",
    # What a model computes
    "network", "transmission", "trigger",
    # Keys, and what they open
    "facts", "unlocking", "key", "kits",
    # Protecting a model, and proving it
    "certificates", "stains", "locks", "inspection", "verification", "commitments", "evidence",
    # Measuring what that costs and withstands
    "evaluation", "services", "object_detection", "attacks", "clients",
    # Whole programs
    "figures", "demo", "releases", "cli",
)  # fmt: skip

# Exceptions: imports of higher modules, for types or inside functions, and why.
UPWARD = {
    ("stainlock.target", "stainlock.insertion"): "types only: a target lists the insertions that were made in it",
    ("stainlock.target", "stainlock.models.references"): "Target.from_reference, an alternative constructor",
}
# Our own modules that are imported inside functions, and why.
LATE = {
    ("stainlock.target", "stainlock.models.references"): "as above",
    ("stainlock.insertion", "stainlock.excitation"): "loads torchvision",
    ("stainlock.models.torchvision_import", "stainlock.models.torchvision_operators"): "loads torch",
}
# Third-party packages that are imported inside functions: not installed everywhere, or slow and rarely needed.
OPTIONAL = {
    "cryptography", "fcntl", "matplotlib", "onnxruntime", "pycocotools", "ray", "rfc3161_client", "rich", "timm",
    "torch.ao.quantization", "torchvision",
}  # fmt: skip

ROOT = Path(stainlock.__file__).parent


@dataclass(frozen=True)
class Import:
    """One import: ``when`` is "load", "call" (inside a function) or "types" (under TYPE_CHECKING)."""

    importer: str
    imported: str
    name: str
    line: int
    when: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported} at {self.when}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imports_in(module: str, body: list[ast.stmt], when: str = "load") -> Iterator[Import]:
    for statement in body:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield Import(module, alias.name, "", statement.lineno, when)
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{module}:{statement.lineno} has a relative import"
            for alias in statement.names:
                whole = f"{statement.module}.{alias.name}"
                imported = whole if whole in MODULES else statement.module or ""
                yield Import(module, imported, alias.name, statement.lineno, when)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports_in(module, statement.body, "call")
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from imports_in(module, statement.body, "types")
            yield from imports_in(module, statement.orelse, when)
        else:
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                for inner in getattr(statement, field, []):
                    if isinstance(inner, ast.stmt):
                        yield from imports_in(module, [inner], when)
                    else:
                        yield from imports_in(module, inner.body, when)


# The front door itself names everything; `test_front_door` is about it.
IMPORTS = [
    found
    for module, path in sorted(MODULES.items())
    if module != "stainlock"
    for found in imports_in(module, ast.parse(path.read_text(encoding="utf-8")).body)
]
OURS = [found for found in IMPORTS if found.imported.split(".")[0] == "stainlock"]


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def test_the_layers_are_all_there_is() -> None:
    assert sorted(LAYERS) == sorted({name.split(".")[1] for name in MODULES if name != "stainlock"})


def test_no_import_goes_up() -> None:
    wrong = [
        str(found)
        for found in OURS
        if found.imported != "stainlock"
        and layer(found.imported) > layer(found.importer)
        and (found.importer, found.imported) not in UPWARD
    ]
    assert wrong == []


def test_only_the_version_is_taken_from_the_front_door() -> None:
    assert [str(found) for found in OURS if found.imported == "stainlock" and found.name != "__version__"] == []


def test_function_level_imports_are_for_optional_packages() -> None:
    """The command line imports the library inside its verbs, so that it answers --help before torch is loaded."""
    wrong = [
        str(found)
        for found in IMPORTS
        if found.when == "call"
        and (found.importer, found.imported) not in LATE
        and not any(found.imported == name or found.imported.startswith(f"{name}.") for name in OPTIONAL)
        and not (found in OURS and found.importer.startswith("stainlock.cli."))
    ]
    assert wrong == []


def test_no_modules_import_each_other_when_loaded() -> None:
    """A module's package is loaded before it; imports of a package by its own files do not count."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for found in OURS:
        if found.when == "load" and found.imported != "stainlock":
            graph[found.importer].add(found.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_exception_is_out_of_date() -> None:
    made = {(found.importer, found.imported) for found in OURS if found.when != "load"}
    assert sorted(set(UPWARD) - made) == []
    assert sorted(set(LATE) - made) == []
    unused = [name for name in OPTIONAL if not any(i.imported.startswith(name) for i in IMPORTS if i.when == "call")]
    assert sorted(unused) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a", [("a", "load")]),
        ("from a import b, c", [("a", "load"), ("a", "load")]),
        ("try:\n    import a\nexcept E:\n    import b\nfinally:\n    import c", [(n, "load") for n in "abc"]),
        ("class K:\n    def f(self):\n        with x:\n            import a", [("a", "call")]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", [("a", "types"), ("b", "load")]),
        ("def f():\n    if x:\n        pass\n    else:\n        import a", [("a", "call")]),
        ("match x:\n    case 1:\n        import a", [("a", "load")]),
    ],
)  # fmt: skip
def test_imports_are_found_wherever_they_stand(source: str, expected: list[tuple[str, str]]) -> None:
    found = list(imports_in("stainlock.x", ast.parse(source).body))
    assert sorted((i.imported, i.when) for i in found) == sorted(expected)
