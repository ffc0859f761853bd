"""Models from libraries, ONNX files and factories in Python files: every reference but a bundle."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from stainlock.errors import FileError, ModelError, StainlockError
from stainlock.models.conventions import target_of
from stainlock.models.libraries import LIBRARIES, build_library_model
from stainlock.models.onnx_import.importing import onnx_target
from stainlock.storage.onnx_files import is_onnx
from stainlock.storage.weights import check_finite, load_weights, one_line
from stainlock.target import Target, check_module

FORMS = (
    "torchvision:NAME, timm:NAME, smp:NAME, transformers:CLASS, hf:DIR, ultralytics:FILE, FILE.onnx, FILE.py:FACTORY,"
    " or a bundle directory"
)
_module_numbers = itertools.count()


def build_reference(
    reference: str,
    *,
    weights: str | Path | None = None,
    seed: int = 0,
    input_shape: tuple[int, ...] | None = None,
) -> Target:
    """The target of any reference but a bundle's: see `stainlock.models.references.load_reference`."""
    weight_file = None if weights in (None, "pretrained", "random") else Path(str(weights))
    if is_onnx(reference):
        if weights is not None:
            raise ModelError(f"{reference} holds its own weights: leave out --weights {weights}")
        return onnx_target(reference, input_shape)
    with _seeded(seed):
        if reference.partition(":")[0] in LIBRARIES:
            target = build_library_model(reference, pretrained=weights in (None, "pretrained"))
        else:
            target = _factory_target(reference)
    check_module(target.model)
    if weight_file is not None:
        load_weights(target.model, weight_file)
    else:
        check_finite(target.model, reference)
    target.model.eval()
    return replace(target, reference=reference)


def call_factory(reference: str) -> Any:
    """Call the function of ``FILE.py:FACTORY`` and return its result."""
    file, _, name = reference.rpartition(":")
    path = Path(file)
    if ":" not in reference and not Path(reference).exists():
        raise FileError(f"{reference} does not exist: expected {FORMS}")
    if path.suffix != ".py" or not name:
        raise ModelError(f"expected {FORMS}, got {reference!r}")
    if not path.is_file():
        raise FileError(f"{file} does not exist: expected a Python file with a function {name}")
    with _importable(path.parent):
        factory = _factory(path, name)
        try:
            return factory()
        except (StainlockError, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, too: it must not become our exit status
            raise ModelError(f"{name}() of {file} raised {type(error).__name__}: {one_line(error)}") from error


def _factory_target(reference: str) -> Target:
    file, _, name = reference.rpartition(":")
    made = call_factory(reference)
    if isinstance(made, nn.Module):
        made = target_of(made)
    if not isinstance(made, Target):
        kind = type(made).__name__
        raise ModelError(f"expected {name}() of {file} to return an nn.Module or a Target, got {kind}")
    if next(made.model.parameters(), None) is None:
        raise ModelError(f"expected a model with parameters from {name}() of {file}, got one with none")
    return made


def _factory(path: Path, name: str) -> Callable[[], Any]:
    try:
        module = _import_file(path)
    except (StainlockError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ModelError(f"{path} can't be imported, {type(error).__name__}: {one_line(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if _is_own_function(value, module)]
        listed = f"it has {', '.join(functions)}" if functions else "it defines no functions"
        raise ModelError(f"{path} has no function {name}: {listed}")
    return factory  # type: ignore[no-any-return]


class _Uncached(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now: cached bytecode may be of an older version written in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_file(path: Path) -> ModuleType:
    # A unique name for each import, so that a file called numpy.py, or two called model.py, do no harm.
    name = f"_stainlock_factory_{next(_module_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_Uncached(name, str(path)))
    if spec is None or spec.loader is None:
        raise FileError(f"{path} can't be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and others look up their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_own_function(value: object, module: ModuleType) -> bool:
    name = getattr(value, "__name__", "_")
    return callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Make modules beside a factory's file importable inside this context, and forget them afterwards.

    The next factory's folder may have a different module of the same name.
    """
    folder = folder.resolve()
    search_path, known = list(sys.path), {name.partition(".")[0] for name in sys.modules}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = search_path
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            if package not in known and _lies_in(module, folder, package):
                del sys.modules[name]


def _lies_in(module: ModuleType, folder: Path, package: str) -> bool:
    """Whether it is the folder's own module or package, not part of an environment inside the folder."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    home = folder / package
    return any(Path(p) == home.with_suffix(".py") or Path(p).is_relative_to(home) for p in places if p)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # Only the CPU's generator: models are initialised there, and torch.manual_seed would also seed the GPU's.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
