"""Loading weight files into models: safetensors, or PyTorch files read without running code from their pickles."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stainlock.errors import FileError, ModelError
from stainlock.storage.files import check_header
from stainlock.storage.values import shown

PYTORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".th", ".tar")
# Names under which training scripts store the weights, next to the optimizer and the epoch.
WRAPPINGS = (
    "state_dict", "model_state_dict", "model_state", "model", "net", "network", "ema", "model_ema",
    "state_dict_ema", "params_ema", "params", "weights", "module",
)  # fmt: skip
# Prefixes that DataParallel, torch.compile and training frameworks add to every name.
PREFIXES = ("module.", "_orig_mod.", "model.")
SHOWN = 3
Flatten = Callable[[Mapping[Any, Any]], dict[Any, Any]]
_DEEPEST = 4  # levels of dicts around the weights
TIED = 4  # tensors may add up to this multiple of the file's size: some models have one tensor under two names
# In older versions of torch, reading a PyTorch file may run code in it even with weights_only=True: CVE-2025-32434
# (below 2.6), CVE-2026-24747 (below 2.10).
SAFE_TORCH = (2, 10)


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load a weight file into the model, in the model's own dtypes; on any error the model stays as it was."""
    load_state(model, read_weights(path), str(path))


def load_state(model: nn.Module, state: dict[str, Tensor], source: str) -> None:
    """The same from a state dict; ``source`` names its origin in errors."""
    own = model.state_dict()
    found = _strip_prefixes(state, own)
    _check_match(own, found, source)
    state = {name: found[name].to(tensor.dtype) for name, tensor in own.items() if name in found}
    _check_finite(model, state, source)
    # Not strict: batch norm counters may be missing; after the check above nothing else can be.
    model.load_state_dict(state, strict=False)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a file, taken out of whatever a training script wrapped around it."""
    path = Path(path)
    if not path.is_file():
        raise FileError(f"expected a weight file, found {'a folder' if path.is_dir() else 'nothing'} at {path}")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        try:
            check_header(path)
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise FileError(f"{path} is not a complete safetensors file ({one_line(error)}): get it again") from error
    if suffix not in PYTORCH_SUFFIXES:
        raise FileError(f"expected weights as .safetensors or {', '.join(PYTORCH_SUFFIXES)}, got {path}")
    content = read_pytorch(path)
    state = unwrap(content)
    if state is None:
        raise not_weights(content, path)
    check_tensors(state, path)
    return {name: tensor.detach() for name, tensor in state.items()}


def read_pytorch(path: Path) -> Any:
    """The content of a PyTorch file: tensors, and whatever they are wrapped in. No code in it is run."""
    check_pytorch_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged files raise an error anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise FileError(
            f"{path} is damaged, or holds Python objects besides tensors, which are never loaded: "
            "save model.state_dict() by itself, preferably as .safetensors"
        ) from error
    except Exception as error:  # torch.load raises nearly anything on damaged and foreign files
        raise FileError(
            f"{path} is not a complete PyTorch file ({one_line(error)}): get it again, or use .safetensors"
        ) from error


def not_weights(content: Any, path: Path) -> FileError:
    return FileError(f"expected a dict of tensors in {path}, got {_describe(content)}: save model.state_dict()")


def check_pytorch_file(path: Path) -> None:
    """Refuse a PyTorch file that can't be read safely, or that would unpack to more than its own size: PyTorch itself
    does not compress tensors."""
    if _torch_version() < SAFE_TORCH:
        raise FileError(
            f"{path} is a PyTorch file, which torch {torch.__version__} can't read safely (CVE-2025-32434,"
            " CVE-2026-24747): use .safetensors, or torch 2.10 or later"
        )
    if not is_zip(path):
        return
    members = members_of(path)
    names = {member.filename.partition("/")[2] for member in members}
    if "constants.pkl" in names and any(name.startswith("code/") for name in names):
        raise FileError(
            f"{path} is a TorchScript program, which holds code: expected weights; save the state_dict() of"
            " torch.jit.load(...) (as a suspect, `verify` and `clients trace` read it as it is)"
        )
    check_stored(members, path)


def is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile as error:  # for example an archive that claims to span several disks
        raise FileError(f"{path} is not a complete PyTorch file ({one_line(error)}): get it again") from error


def members_of(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise FileError(f"{path} is not a complete PyTorch file ({one_line(error)}): get it again") from error


def check_stored(members: Sequence[zipfile.ZipInfo], path: Path) -> None:
    """Refuse a zip file that is compressed, or that would unpack to more than its own size."""
    unpacked = sum(member.file_size for member in members)
    if any(member.compress_type != zipfile.ZIP_STORED for member in members) or unpacked > path.stat().st_size:
        raise FileError(f"{path} is compressed, which PyTorch's own files are not ({unpacked} bytes unpacked): save it"
                        " with torch.save, or as .safetensors")  # fmt: skip


def check_tensors(state: Mapping[str, Tensor], path: Path, *, quantised: bool = False) -> None:
    """Refuse tensors larger than the file could hold (expanded, or repeated under many names), and sparse, nested or
    other unusual ones."""
    for name, tensor in ((shown(name), tensor) for name, tensor in state.items()):
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        plain = plain and (quantised or not tensor.is_quantized)
        if not plain or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested:
            raise FileError(f"expected plain tensors in {path}, got {name} of another kind: save model.state_dict()")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise FileError(f"{path} has {tensor.numel()} elements in {name} and values for fewer: save it contiguous")
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if size > TIED * path.stat().st_size:
        raise FileError(f"{path} has the same values under many names, {size} bytes in all: expected a model's weights")


def _torch_version() -> tuple[int, int]:
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


def check_finite(model: nn.Module, source: str = "the model") -> None:
    """Raise ModelError if a weight is NaN or infinite, since all results would be worthless. A buffer with only zeros
    and infinities is allowed: it is a mask, or a bound that clips nothing."""
    _check_finite(model, model.state_dict(), source)


def one_line(error: BaseException) -> str:
    """An exception's message, short and on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def _check_finite(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, tensor in state.items():
        if not tensor.is_floating_point() or (name in buffers and bool(((tensor == 0) | tensor.isinf()).all())):
            continue
        bad = int((~tensor.isfinite()).sum())
        if bad:
            raise ModelError(
                f"{source} has NaN or infinite values in {shown(name)} ({bad} of {tensor.numel()}): fix them first"
            )


def unwrap(content: Any, flatten: Flatten = dict, depth: int = 0) -> dict[str, Tensor] | None:
    """The dict of tensors within nested dicts, to a limited depth: under one of `WRAPPINGS`, or else the only one. None
    if there is none. ``flatten`` is applied to each dict first."""
    if not isinstance(content, Mapping) or not content:
        return None
    content = flatten(content)
    if all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
        return dict(content)
    if depth == _DEEPEST:
        return None
    inner: dict[int, dict[str, Tensor] | None] = {}  # each dict is unwrapped once, however often it occurs

    def unwrapped(value: Any) -> dict[str, Tensor] | None:
        if id(value) not in inner:
            inner[id(value)] = unwrap(value, flatten, depth + 1)
        return inner[id(value)]

    for name in WRAPPINGS:
        state = unwrapped(content.get(name))
        if state is not None:
            return state
    others = [state for state in map(unwrapped, content.values()) if state is not None]
    return others[0] if len(others) == 1 else None


def _describe(content: Any) -> str:
    if not isinstance(content, Mapping):
        return type(content).__name__
    return f"a dict with {_some([shown(key) for key in content])}" if content else "an empty dict"


def _strip_prefixes(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        everywhere = bool(state) and all(name.startswith(prefix) for name in state)
        if everywhere and not any(name.startswith(prefix) for name in own):
            stripped = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
            return _strip_prefixes(stripped, own)
    return state


def _check_match(own: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    missing = [shown(name) for name in own if name not in found and not _is_counter(name)]
    unexpected = [shown(name) for name in found if name not in own and not _is_counter(name)]
    unlike = []
    for name in own.keys() & found.keys():
        expected, came = own[name], found[name]
        if expected.shape != came.shape:
            unlike.append(f"{shown(name)} {tuple(came.shape)} where the model has {tuple(expected.shape)}")
        elif expected.is_floating_point() and not came.is_floating_point():
            unlike.append(f"{shown(name)} {came.dtype} where the model has {expected.dtype}")
    problems = [("missing", missing), ("unexpected", unexpected), ("not matching", sorted(unlike))]
    told = [f"{len(names)} {problem} ({_some(names)})" for problem, names in problems if names]
    if told:
        raise ModelError(
            f"{source} does not fit the model: {', '.join(told)}; "
            "give the weights of this architecture, or the arguments they were trained with"
        )


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == "num_batches_tracked"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
