"""What a Hugging Face folder may not ask for: code, downloads, or a model larger than its weights.

A folder may come from a stranger, and settings in its config.json make transformers download and run things: code
beside the weights (``auto_map``), kernels from the hub (``attn_implementation``), backbones with weights of their own.
Numbers in it decide how much memory is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stainlock.errors import ModelError
from stainlock.storage.values import shown

LAYERS = ("layer", "depth", "block", "repeat", "stage")  # parts of names of settings that count layers, which cost time
_ATTENTION = (None, "", "eager", "sdpa")  # PyTorch's own; any other may be a kernel to download
_MOST_LAYERS = 1000
_MOST_WEIGHTS = 2**32  # limit if there are no weights beside the configuration


def check_config(config: Any, folder: Path, inside: str = "") -> None:
    """Refuse a configuration, nested parts included, that asks for code, downloads or too many layers."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if name == "auto_map" and value is not None:
            raise ModelError(
                f"{folder} names code of its own ({inside}auto_map in config.json), which is never run: build the model"
                " in a FILE.py:FACTORY"
            )
        if "implementation" in name and not isinstance(value, bool) and value not in _ATTENTION:
            raise ModelError(
                f"{folder} asks for the kernel {shown(value)} ({inside}{shown(name)} in config.json), which may be code"
                " to download: expected eager or sdpa"
            )
        if name == "quantization_config" and value is not None:
            raise ModelError(f"{folder} has quantised weights ({inside}{name} in config.json): expected plain ones")
        if inside and name == "use_pretrained_backbone" and value:
            raise ModelError(f"{folder} asks for weights to download ({inside}{name} in config.json): set it to false")
        if any(part in name for part in LAYERS) and _count(name, value) > _MOST_LAYERS:
            raise ModelError(
                f"{folder} asks for {shown(_count(name, value))} layers ({inside}{shown(name)} in config.json)"
            )
        if isinstance(value, dict):
            check_config(value, folder, f"{inside}{shown(name)}.")


def _count(name: str, value: Any) -> int:
    numbers = value if isinstance(value, list) else [value]
    if name.endswith("channels"):  # widths of layers or stages, one for each
        return len(numbers)
    return sum(number for number in numbers if isinstance(number, int))


def check_size(build: Callable[[], nn.Module], folder: Path) -> None:
    """Refuse a model with more weights than the folder's files can hold, before memory is allocated."""
    try:
        with torch.device("meta"):
            size = sum(tensor.numel() for tensor in build().parameters())
    except NotImplementedError:  # it can't be built without memory
        return
    held = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    if size > (held or _MOST_WEIGHTS):
        raise ModelError(f"its configuration asks for {size} weights, but its files have room for {held}")


@contextmanager
def offline() -> Iterator[None]:
    """A context in which nothing is downloaded from the Hugging Face hub."""
    constants: Any = import_module("huggingface_hub.constants")
    errors: Any = import_module("huggingface_hub.errors")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise ModelError(
            "it needs something from the Hugging Face hub, but nothing is downloaded for a folder"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before
