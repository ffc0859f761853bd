"""gates.py of a client kit: the code that runs a keyed lock, as one file that needs only torch.

It is extracted from this package's own source, so there is only one implementation of the gates. The definitions that
`attach` and an object detector's transform depend on are copied, without comments and docstrings. The lock's public
parameters follow as constructor calls.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from types import ModuleType

from stainlock import errors
from stainlock.gating import chacha, frames, gated, gates, own_weights, reader, schedule
from stainlock.gating.structure import Structure
from stainlock.unlocking import object_detectors

_HOMES: tuple[ModuleType, ...] = (
    errors, chacha, schedule, reader, frames, gated, own_weights, gates, object_detectors,
)  # fmt: skip


def runtime_source(structure: Structure | None, *, detects: bool) -> str:
    """Source of gates.py: ``put_in(model)`` adds a lock's reader and gates; ``detects`` includes `PatchedTransform`."""
    needed = ["attach", "Layout", "Schedule", "Gated"] if structure else []
    source = _definitions([*needed, "PatchedTransform"] if detects else needed)
    return source + (_put_in(structure) if structure else "")


def _put_in(structure: Structure) -> str:
    listed = "".join(f"    {gate!r},\n" for gate in structure.gates)
    return (
        f"\n\nLAYOUT = {structure.layout!r}\nSCHEDULE = {structure.schedule!r}\nGATES = (\n{listed})\n\n\n"
        "def put_in(model):\n"
        f"    attach(model, {structure.name!r}, LAYOUT, SCHEDULE, GATES, {structure.reader!r})\n"
    )


def _definitions(roots: Iterable[str]) -> str:
    """Source of these names and of everything they depend on, with the imports they need, in the order of `_HOMES`."""
    found: dict[str, ast.stmt] = {}
    imports: dict[str, ast.stmt] = {}
    for module in _HOMES:
        for statement in ast.parse(inspect.getsource(module)).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                _note_imports(statement, imports)
            else:
                found |= dict.fromkeys(_defined(statement), statement)
    wanted, waiting = set[str](), list(roots)
    while waiting:
        name = waiting.pop()
        if name in wanted or (name not in found and name not in imports):
            continue
        wanted.add(name)
        if name in found:
            waiting += [node.id for node in ast.walk(found[name]) if isinstance(node, ast.Name)]
    needed = {ast.unparse(imports[name]) for name in wanted if name in imports and name not in found}
    bodies = dict.fromkeys(statement for name, statement in found.items() if name in wanted)
    parts = ["from __future__ import annotations\n\n" + "\n".join(sorted(needed))]
    return "\n\n\n".join([*parts, *(ast.unparse(_without_docstrings(body)) for body in bodies)]) + "\n"


def _note_imports(statement: ast.Import | ast.ImportFrom, imports: dict[str, ast.stmt]) -> None:
    """Record imports from outside this package, one name each; our own definitions are copied instead."""
    if isinstance(statement, ast.ImportFrom):
        if statement.module == "__future__" or (statement.module or "").startswith("stainlock"):
            return
        for alias in statement.names:
            imports[alias.asname or alias.name] = ast.ImportFrom(statement.module, [alias], statement.level)
    else:
        for alias in statement.names:
            imports[(alias.asname or alias.name).partition(".")[0]] = ast.Import([alias])


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [] if any("overload" in ast.unparse(d) for d in statement.decorator_list) else [statement.name]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    if isinstance(statement, ast.Assign):
        return [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return []


def _without_docstrings(statement: ast.stmt) -> ast.stmt:
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return statement
