"""CONFIG.toml of a release: the model, and the settings of each step. Unknown names are refused."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stainlock.errors import FileError
from stainlock.storage.files import exists
from stainlock.storage.values import shown
from stainlock.storage.weights import one_line

# The known names and their types. Paths are relative to the file.
_TOP: dict[str, tuple[type, ...]] = {
    "model": (str,), "weights": (str,), "out": (str,), "data": (str,), "limit": (int,), "seed": (int,),
    "pixels": (dict,), "stain": (dict, bool), "lock": (dict, bool), "certify": (bool,), "commit": (dict, bool),
    "client": (dict, bool),
}  # fmt: skip
_SECTIONS: dict[str, dict[str, tuple[type, ...]]] = {
    "pixels": {"input_shape": (list,), "mean": (list,), "std": (list,), "bounds": (list,)},
    "stain": {"site": (str,), "additive": (bool,), "schema": (str,), "message": (str,), "count": (int,)},
    "lock": {"kind": (str,), "site": (str,), "bits": (int,), "carrier": (str,), "strength": (int, float)},
    "commit": {"signing_key": (str,), "statement": (str,)},
    "client": {"format": (str,)},
}


@dataclass(frozen=True)
class Config:
    """A release's settings. ``None`` for a step that is switched off (``lock = false``)."""

    path: Path
    model: str
    out: Path
    weights: str | None = None
    data: Path | None = None
    limit: int | None = None
    seed: int | None = None
    pixels: dict[str, Any] = field(default_factory=dict)
    stain: dict[str, Any] | None = field(default_factory=dict)
    lock: dict[str, Any] | None = field(default_factory=dict)
    certify: bool = True
    commit: dict[str, Any] | None = field(default_factory=dict)
    client: dict[str, Any] | None = field(default_factory=dict)
    digest: str = ""

    @property
    def signing_key(self) -> Path:
        named = (self.commit or {}).get("signing_key")
        return self.path.parent / named if named else self.out / "signing.pem"


def read_config(path: str | Path) -> Config:
    """Read a settings file; anything wrong with it is a one-line `FileError`."""
    path = Path(path)
    try:
        content = path.read_bytes()
        found = tomllib.loads(content.decode())
    except OSError as error:
        raise FileError(f"can't read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path} is not TOML: {one_line(error)}") from error
    _check(path, "", found, _TOP)
    for name, known in _SECTIONS.items():
        if isinstance(found.get(name), dict):
            _check(path, f"[{name}] ", found[name], known)
    for name in ("model", "out"):
        if name not in found:
            raise FileError(f'{path} has no {name}: expected {name} = "..."')
    settings: dict[str, Any] = dict(found)
    for name in ("stain", "lock", "commit", "client"):
        value = settings.get(name, True)
        settings[name] = dict(value) if isinstance(value, dict) else {} if value else None
    if settings["stain"] is None and settings["lock"] is None:
        raise FileError(f"{path} switches off both stain and lock: expected one of them")
    folder = path.parent
    settings["out"] = folder / settings["out"]
    settings["model"] = _beside(folder, settings["model"])
    if "data" in settings:
        settings["data"] = folder / settings["data"]
    if settings.get("weights") not in (None, "pretrained", "random"):
        settings["weights"] = str(folder / settings["weights"])
    return Config(path=path, digest=_digest(found), **settings)


def _beside(folder: Path, model: str) -> str:
    """Make a file or folder relative to the config; leave a library's model as it is."""
    file = model.rpartition(":")[0] if model.rpartition(":")[0].endswith(".py") else model
    return str(folder / model) if exists(folder / file) else model


def _digest(found: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def _check(path: Path, where: str, found: Mapping[str, Any], known: Mapping[str, tuple[type, ...]]) -> None:
    for name, value in found.items():
        if name not in known:
            raise FileError(f"{path} has {where}{shown(name)}: expected {', '.join(known)}")
        if not isinstance(value, known[name]) or (isinstance(value, bool) and bool not in known[name]):
            wanted = " or ".join(kind.__name__ for kind in known[name])
            raise FileError(f"{path}: expected {where}{name} as {wanted}, got {shown(repr(value))}")
