"""`import stainlock`: what it offers, and what it does not load."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
from torch import nn

import stainlock as sl
from stainlock.cli.app import VERBS

# Slow to import, or not installed everywhere: loaded only by code that needs them.
HEAVY = ("torchvision", "torch._dynamo", "scipy.stats", "matplotlib", "timm")
# Verbs without a function: one is a demonstration, the other is the class `Registry` in Python.
FUNCTIONS = sorted(set(VERBS) - {"demo", "clients"})


def new_process(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def loaded_after(script: str, start: Callable[[str], subprocess.CompletedProcess[str]] = new_process) -> set[str]:
    """The modules that a fresh interpreter has loaded at the end of a script; `fresh.run` has loaded torch before."""
    done = start(f"{script}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_importing_stainlock_loads_next_to_nothing() -> None:
    loaded = loaded_after("import stainlock")
    assert not loaded & {*HEAVY, "torch", "numpy", "scipy"}


def test_the_whole_library_loads_without_heavy_packages() -> None:
    """Packages are reached through stainlock, as the docs write it, after `import stainlock` alone; then every public
    name is loaded but `reproduce`, whose figures need them."""
    names = sorted(set(sl.__all__) - {"reproduce"})
    packages = "import stainlock\nstainlock.locks.layers_in_floats, stainlock.verification.Reference"
    loaded = loaded_after(f"{packages}\nfrom stainlock import {', '.join(names)}")
    assert "torch" in loaded
    assert not loaded & set(HEAVY)


def test_verifying_a_weight_file_loads_no_torchvision(tmp_path: Path) -> None:
    script = f"""
import torch
from torch import nn
import stainlock as sl
from stainlock.cli import main
from safetensors.torch import save_file

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4))
stained, key = sl.stain(sl.Target(model, input_shape=(32,), mean=(0,), std=(1,)), seed=0)
key.save({str(tmp_path / "owner.key")!r})
save_file(stained.model.state_dict(), {str(tmp_path / "suspect.safetensors")!r})
assert main(["verify", {str(tmp_path / "suspect.safetensors")!r}, "--key", {str(tmp_path / "owner.key")!r}]) == 0
"""
    assert not loaded_after(script, start=fresh.run) & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["stain", "--help"], ["lock", "--typo"]])
def test_the_command_answers_without_torch(arguments: list[str]) -> None:
    loaded = loaded_after(f"import sys\nsys.argv[0] = 'stainlock'\nfrom stainlock.cli import main\nmain({arguments!r})")
    assert not loaded & {*HEAVY, "torch", "numpy", "scipy", "rich.table"}


REGISTRY_VERBS = [
    ["clients", "add", "acme", "globex"], ["clients", "list", "--json"], ["clients", "show", "acme"],
    ["clients", "rotate", "acme"], ["clients", "revoke", "globex"], ["clients", "export", "--out", "clients.csv"],
    ["clients", "check"], ["commit", "--out", "log.json", "--new-signing-key", "me.pem"],
    ["clients", "check", "--commitment", "log.json"],
]  # fmt: skip


def test_names_and_dates_of_clients_need_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in SQLite; waiting seconds for torch to list them would be a nuisance."""
    monkeypatch.chdir(tmp_path)
    base = sl.Target(nn.Sequential(nn.Linear(64, 40), nn.ReLU()), (64,), mean=(0,), std=(1,))
    with sl.Registry("clients.db") as registry:
        registry.init(base, name="mine")
    calls = [[*verb, "--registry", "clients.db"] for verb in REGISTRY_VERBS]
    loaded = loaded_after(f"from stainlock.cli import main\nassert [main(call) for call in {calls!r}] == [0] * 9")
    assert not loaded & {*HEAVY, "torch", "numpy", "scipy"}
    assert (tmp_path / "clients.csv").read_text().count("\n") == 3


def test_every_verb_is_a_function_of_the_same_name() -> None:
    for name in FUNCTIONS:
        function = getattr(sl, name)
        assert inspect.isfunction(function), name
        assert function.__name__ == name
        assert function.__doc__


def test_no_module_has_the_name_of_a_function() -> None:
    modules = {module.name for module in pkgutil.iter_modules(sl.__path__)}
    assert not modules & set(sl.__all__)
    assert not modules & set(FUNCTIONS)


def test_the_table_the_type_checker_and_all_name_the_same() -> None:
    tree = ast.parse(Path(sl.__file__).read_text(encoding="utf-8"))
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    typed = {
        alias.asname or alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert typed == {name: f"stainlock.{home}" for name, home in sl._HOMES.items()}
    assert sorted(sl.__all__) == sorted(sl._HOMES)


def test_every_name_is_there_and_listed() -> None:
    for name in sl.__all__:
        assert getattr(sl, name).__module__ == f"stainlock.{sl._HOMES[name]}"
    assert set(sl.__all__) <= set(dir(sl))


def test_what_is_not_there_is_an_attribute_error() -> None:
    for name in ("stains_", "no_such_name", "_private", "__wrapped__"):
        assert not hasattr(sl, name)


def public_functions() -> Iterator[tuple[str, Any]]:
    """Every public function, and every public method of a public class."""
    for name in sl.__all__:
        thing = getattr(sl, name)
        if inspect.isfunction(thing):
            yield name, thing
        elif inspect.isclass(thing):
            for method, value in vars(thing).items():
                value = getattr(value, "__func__", value)
                if inspect.isfunction(value) and not method.startswith("_"):
                    yield f"{name}.{method}", value


def test_options_are_passed_by_name() -> None:
    """A call says what each option is; only what a function acts on, such as a target and a key, goes by position."""
    by_position = {
        f"{title}({given.name})"
        for title, function in public_functions()
        for given in inspect.signature(function).parameters.values()
        if given.kind is given.POSITIONAL_OR_KEYWORD and given.default is not given.empty
    }
    # Here the subject itself may be left out: a registry's only model, or the file to compare with a commitment.
    assert by_position == {"Registry.base(given)", "Commitment.check(suspect)", "Commitment.opens(model)"}


def test_the_name_that_readmes_of_older_client_kits_use() -> None:
    assert sl.unlock_detector is sl.unlock_object_detector
