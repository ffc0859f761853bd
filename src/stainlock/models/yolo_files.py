"""Files of ultralytics that may come from a stranger: checkpoints, which are pickles, and YAML files.

``weights_only=True`` alone does not make such a pickle harmless: it may call any class that it may name, and
ultralytics' models evaluate text in their arguments. So every class is replaced by a stand-in that creates an empty
layer, which is filled with the file's values; no constructor runs. A YAML file names what is called for each of its
rows: only layers are allowed, with numbers within bounds.
"""

from __future__ import annotations

import pickle
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stainlock.errors import FileError, ModelError
from stainlock.storage.values import check_number, check_text, check_whole, expect, shown
from stainlock.storage.weights import check_pytorch_file, check_tensors, one_line

_PARTS = ("block", "conv", "head", "transformer", "utils")  # of ultralytics.nn.modules
# ultralytics evaluates a YAML file's activation as Python.
_PLAIN_ACTIVATION = re.compile(r"(torch\.)?nn\.[A-Za-z0-9]+\([A-Za-z0-9_=., -]*\)")
_DOWNLOADS = "TorchVision"  # a layer that fetches weights
_LONGEST_YAML = 2**20  # bytes
_MOST_LAYERS, _MOST_REPEATS, _LARGEST = 1000, 100, 2**16  # limits on rows, repeats of a row, and numbers in settings


def read_checkpoint(path: Path, tasks: Any) -> Any:
    """The module in a checkpoint, built from known layers and tensors without calling anything that the file names."""
    if not path.is_file():
        raise FileError(f"{path} does not exist")
    check_pytorch_file(path)
    try:
        with _allowing(_fillable(path, tasks)):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path} is damaged, or can't be read without running code of its own: expected tensors and layers of"
            " ultralytics' own; build the model in a FILE.py:FACTORY"
        ) from error
    except Exception as error:  # torch.load raises nearly anything on damaged and foreign files
        raise FileError(f"{path} is not a complete ultralytics checkpoint ({one_line(error)}): get it again") from error
    model = next((found[name] for name in ("ema", "model") if found.get(name)), None) if type(found) is dict else None
    if not isinstance(model, tasks.BaseModel):
        raise FileError(f"{path} holds no model: expected a checkpoint that ultralytics wrote")
    check_tensors(model.state_dict(), path)
    return model


@contextmanager
def _allowing(classes: list[Any]) -> Iterator[None]:
    """Let a pickle name these classes only, not those allowed elsewhere in this process, which it could call."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(classes):
            yield
    finally:
        torch.serialization.add_safe_globals(before)


def _fillable(path: Path, tasks: Any) -> list[Any]:
    """For every layer that a checkpoint names: its stand-in, and the layer itself under a name that no file knows."""
    modules = [tasks, nn, import_module("ultralytics.nn.modules")]
    modules += [import_module(f"ultralytics.nn.modules.{name}") for name in _PARTS]
    layers = {value for module in modules for value in vars(module).values() if _is_layer(value)}
    plain = import_module("ultralytics.utils").IterableSimpleNamespace
    named = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    allowed: list[Any] = []
    for cls in (*layers, plain):
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name in named:
            allowed += [(_stand_in(cls), name), (cls, f"{secrets.token_hex(16)}.{cls.__name__}")]
    return allowed


def _stand_in(cls: Any) -> type:
    """A class that creates empty objects of another class."""

    def empty(_: type, *given: object) -> Any:
        if given:
            raise pickle.UnpicklingError(f"it calls {cls.__name__} with arguments")
        return cls.__new__(cls)

    return type(cls.__name__, (), {"__new__": empty})


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def read_yaml(path: Path, tasks: Any) -> dict[str, Any]:
    """A model's YAML file. Every row names a layer; everything else is numbers and text."""
    if not path.is_file():
        raise FileError(f"{path} does not exist")
    if path.stat().st_size > _LONGEST_YAML:
        raise FileError(f"{path} is too long for a model's YAML file: it has {path.stat().st_size} bytes")
    try:
        config: Any = tasks.YAML.load(path)
    except Exception as error:  # from the parser or the text's encoding
        raise FileError(f"{path} can't be read as YAML: {one_line(error)}") from error
    try:
        _check_yaml(config, tasks)
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(f"{path} describes no model of ultralytics: {shown(str(error))}") from error
    return {**config, "scale": tasks.guess_model_scale(path), "yaml_file": str(path)}


def _check_yaml(config: Any, tasks: Any) -> None:
    expect(isinstance(config, dict), "backbone and head", type(config).__name__)
    activation = config.get("activation")
    if activation is not None and not (isinstance(activation, str) and _PLAIN_ACTIVATION.fullmatch(activation)):
        told = shown(activation) if isinstance(activation, str) else type(activation).__name__
        raise ModelError(f"its activation is Python code, which is not run: expected one like nn.SiLU(), got {told}")
    rows = [row for part in ("backbone", "head") for row in _list(config[part], part)]
    expect(len(rows) <= _MOST_LAYERS, f"at most {_MOST_LAYERS} layers", len(rows))
    for row in rows:
        expect(isinstance(row, list) and len(row) == 4, "[from, repeats, layer, arguments] as a row", "another")
        origin, repeats, layer, arguments = row
        for number in origin if isinstance(origin, list) else [origin]:
            check_whole(number, "from", -_MOST_LAYERS, _MOST_LAYERS)
        check_whole(repeats, "repeats", 1, _MOST_REPEATS)
        _check_layer(layer, tasks)
        _check_values(_list(arguments, "arguments"))
    _check_values([value for name, value in config.items() if name not in ("backbone", "head")])
    deepest = max(_depths(config), default=1.0)
    layers = sum(max(row[1], round(row[1] * deepest)) for row in rows)
    expect(layers <= _MOST_LAYERS, f"at most {_MOST_LAYERS} layers", f"{layers} at its greatest depth")


def _depths(config: dict[str, Any]) -> list[float]:
    """The factors by which repeats are multiplied, at any of the model's scales."""
    scales = config.get("scales")
    given = [config.get("depth_multiple"), *(scales.values() if isinstance(scales, dict) else [])]
    first = [value[0] if isinstance(value, list) and value else value for value in given]
    return [float(value) for value in first if isinstance(value, int | float)]


def _check_layer(name: Any, tasks: Any) -> None:
    """Refuse all but layers: ultralytics calls anything of that name in its module, and one layer downloads weights."""
    check_text(name, "a layer's name")
    library, _, own = name.rpartition(".")
    found: Any
    if library == "torchvision.ops":
        found = getattr(import_module(library), own, None)
    else:
        found = getattr(nn, own, None) if library == "nn" else vars(tasks).get(name)
    if not _is_layer(found):
        raise ModelError(f"expected layers of ultralytics or torch.nn in its rows, got {shown(name)}")
    if name == _DOWNLOADS or issubclass(found, tasks.BaseModel):
        raise ModelError(f"its layer {name} may download weights or read files: build the model in a FILE.py:FACTORY")


def _check_values(values: list[Any], depth: int = 0) -> None:
    expect(depth <= 4 and len(values) <= _MOST_LAYERS, "short lists", "long or nested ones")
    for value in values:
        if isinstance(value, dict):
            _check_values([*value.keys(), *value.values()], depth + 1)
        elif isinstance(value, list):
            _check_values(value, depth + 1)
        elif isinstance(value, str):
            check_text(value, "a setting")
        elif value is not None and not isinstance(value, bool):
            check_number(value, "a setting")
            expect(abs(value) <= _LARGEST, f"numbers of at most {_LARGEST}", value)


def _list(found: Any, name: str) -> list[Any]:
    expect(isinstance(found, list), f"a list as {name}", type(found).__name__)
    return list(found)
