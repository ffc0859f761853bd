"""Records that stainlock leaves for itself or for others, and small files that it is given with them."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import models
import numpy as np
import torch
from other_formats import authority, commitment, timestamps
from PIL import Image

from stainlock import FileError, lock, save_bundle
from stainlock.clients.suspects import read_suspect
from stainlock.commitments.evidence import read_roots
from stainlock.commitments.signing import read_public_key
from stainlock.evaluation.data import open_image
from stainlock.figures import all_figures
from stainlock.figures.output import CONFIGURATION
from stainlock.figures.report import RECORD, write_report
from stainlock.figures.run import _seconds_before
from stainlock.models.bundle import WEIGHTS
from stainlock.releases.config import read_config
from stainlock.releases.release import _STATE, _Release
from stainlock.services.labels import Classes
from stainlock.storage.records import read_json
from stainlock.storage.staging import _COMMITTED, _OUTPUTS, Staging

# A release's record, in its folder

_FACTORY = """
from torch import nn
def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
"""
_SETTINGS = 'model = "nets.py:make"\nout = "."\nweights = "random"\n[pixels]\ninput_shape = [3, 2, 2]\n'


def release_records() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "release"
        place.mkdir()
        _Release(_release(place))
        return [(place / _STATE).read_bytes()]


def _release(folder: Path) -> Any:
    (folder.parent / "nets.py").write_text(_FACTORY)
    (folder.parent / "release.toml").write_text(_SETTINGS.replace('"."', json.dumps(folder.name)))
    return read_config(folder.parent / "release.toml")


def use_release_record(path: Path) -> None:
    place = path.parent / "release"
    place.mkdir()
    path.rename(place / _STATE)
    _Release(_release(place))


# A figure's record and configuration


def figures() -> list[bytes]:
    """As `write_figure` writes it, with a plot and two tables."""
    table = {"file": "a.csv", "caption": "numbers", "shown": ["d", "sigma"], "rows": [{"d": 3, "sigma": 0.5}]}
    record = {
        "figure": next(iter(all_figures())), "group": "stains", "title": "Stains of a model", "shows": "what it shows",
        "paper": {"model": "ResNet50", "figure": "Fig. 3"}, "model": "mine", "ran_on": "photographs", "quick": True,
        "seconds": 12.5, "layers": ["conv"], "detectors": 3, "images": 10, "findings": ["one", "two"],
        "plots": [{"file": "p.png", "caption": "a plot", "photographic": False}],
        "tables": [table, {**table, "file": "paper.csv"}],
    }  # fmt: skip
    return [json.dumps(record).encode()]


def use_figure(path: Path) -> None:
    folder = path.parent / next(iter(all_figures()))
    folder.mkdir()
    path.rename(folder / RECORD)
    shutil.copy(folder / RECORD, folder / CONFIGURATION)
    (folder / "p.png").write_bytes(_picture("PNG"))
    _seconds_before(folder)
    write_report(path.parent)


# What an interrupted run left


def outputs() -> list[bytes]:
    return [json.dumps(["/nowhere/out", "/nowhere/owner.key"]).encode()]


def use_outputs(path: Path) -> None:
    """The run was committed; its first output is in place of the list's first where that is nowhere."""
    given = path.read_bytes().replace(b"/nowhere", str(path.parent).encode())
    staged = [path.parent / f".{name}.stainlock" for name in ("out", "owner.key")]
    for folder in staged:
        folder.mkdir()
        (folder / _OUTPUTS).write_bytes(given)
        (folder / folder.name[1:].removesuffix(".stainlock")).write_bytes(b"made")
    (staged[0] / _COMMITTED).touch()
    try:
        with Staging([path.parent / "out", path.parent / "owner.key"]) as staging:
            staging.commit()
    except FileError as error:
        if "was completed now" not in str(error):
            raise


# Class names


def class_name_lists() -> list[bytes]:
    return [b"cat\ndog\n\nsea lion\n", "\ufeffÄsche\r\nHecht\r\n".encode()]


def spoil_lines(content: bytes, random: Random) -> bytes:
    """Other lines: long, twice, none, of odd characters."""
    lines = content.splitlines() or [b""]
    for _ in range(random.randint(1, 3)):
        odd = random.choice([b"", b"cat", b"\xff\xfe", b"\0", b"x" * 5000, "²٣".encode(), b"-0", b"9" * 400, b"\x85"])
        lines.insert(random.randint(0, len(lines)), odd)
    return random.choice([b"\n", b"\r", b"\r\n", b"\x0c"]).join(lines) * random.choice([1, 1, 1000])


def use_class_names(path: Path) -> None:
    classes = Classes.of(path.name, 0, path.parent)
    for name in (*classes.names[:3], "3", 2):
        classes.index(name)


# What dates and vouches for commitments


def roots() -> list[bytes]:
    return [authority().root.read_bytes()]


def use_roots(path: Path) -> None:
    commitment().with_timestamp(timestamps()[0], "stamp").read_timestamps(read_roots(path))


@functools.cache
def public_keys() -> list[bytes]:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    form = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return [ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(*form),
            ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(*form)]  # fmt: skip


def use_public_key(path: Path) -> None:
    read_public_key(str(path))


def log_entries() -> list[bytes]:
    digest = commitment().digest
    return [json.dumps({"body": {"hashes": [digest]}, "logIndex": 7, "integratedTime": 1.5e9}).encode()]


def use_log_entry(path: Path) -> None:
    logged = commitment().with_log_entry(read_json(path, "log's entry"), str(path))
    logged.to_json()


# A suspect's bundle whose digest is wrong: its weights count, and what it says of a lock


@functools.cache
def _locked_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="stainlock-fuzz-")) / "bundle"
    base = dataclasses.replace(models.mlp(), reference="nets.py:make")
    save_bundle(lock(base, kind="keyed", seed=1)[0], folder)
    return folder


def suspects() -> list[bytes]:
    facts = json.loads((_locked_folder() / "stainlock.json").read_text())
    return [json.dumps({**facts, "digest": "0" * 64}).encode()]


def use_suspect(path: Path) -> None:
    shutil.copy(_locked_folder() / WEIGHTS, path.parent / WEIGHTS)
    suspect = read_suspect(path.parent)
    if suspect.lock is not None:
        _ = suspect.opened(1).digest


# Photographs in every format


def _picture(kind: str) -> bytes:
    levels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(levels).save(buffer, kind)
    return buffer.getvalue()


@functools.cache
def photographs() -> list[bytes]:
    return [_picture(kind) for kind in ("JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]


def use_photograph(path: Path) -> None:
    for mode in ("RGB", "L"):
        torch.from_numpy(np.array(open_image(path, mode)))
