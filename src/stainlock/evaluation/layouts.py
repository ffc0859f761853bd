"""Folder layouts: which files are images, and which class each belongs to."""

from __future__ import annotations

import csv
import importlib
import re
from pathlib import Path
from typing import Any

from stainlock.errors import FileError
from stainlock.models.class_names import class_names
from stainlock.storage.files import exists
from stainlock.storage.values import shown

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def find_images(root: Path) -> tuple[list[Path], list[int] | None]:
    """Image files of a folder in a fixed order, and their class indices if the layout has any."""
    if not root.is_dir():
        raise FileError(f"expected a folder of images, found {'a file' if root.exists() else 'nothing'} at {root}")
    if (root / "labels.csv").is_file():
        return _read_labels(root / "labels.csv")
    if (root / "annotations.json").is_file() and (root / "images").is_dir():  # COCO: boxes, no class per image
        return _some_images(root, _images_in(root / "images")), None
    classes = _folders(root)
    inside = [_images_in(entry) for entry in classes]
    beside = _images_in(root, deep=False)
    if not any(inside):
        return _some_images(root, beside), None
    if beside:
        raise FileError(f"{root} has images beside class folders (such as {beside[0].name}): keep one kind")
    indices = _class_indices(root, [entry.name for entry in classes])
    labels = [index for index, paths in zip(indices, inside, strict=True) for _ in paths]
    return [path for paths in inside for path in paths], labels


def class_folders(root: Path) -> dict[int, str]:
    """The names of the class folders by class index; empty if there is a ``labels.csv`` or boxes instead.

    For ImageNet, whose folders are named by WordNet ids, these are the names of the classes.
    """
    if (root / "labels.csv").is_file() or (root / "annotations.json").is_file():
        return {}
    names = [folder.name for folder in _folders(root)]
    return dict(enumerate(class_names("imagenet") if _are_imagenet(names) else names))


def numbered_folders(root: Path) -> list[str]:
    """Class folders whose indices follow from their order; empty if something else defines the indices."""
    if (root / "labels.csv").is_file() or (root / "annotations.json").is_file():
        return []
    names = [folder.name for folder in _folders(root) if _images_in(folder)]
    return [] if _are_imagenet(names) else names


def _folders(root: Path) -> list[Path]:
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _are_imagenet(names: list[str]) -> bool:
    return bool(names) and all(re.fullmatch(r"n[0-9]{8}", name) for name in names)


def _images_in(folder: Path, deep: bool = True) -> list[Path]:
    found = folder.rglob("*") if deep else folder.iterdir()
    return sorted(path for path in found if path.suffix.lower() in SUFFIXES and path.is_file())


def _some_images(root: Path, paths: list[Path]) -> list[Path]:
    if not paths:
        raise FileError(f"{root} has no images: expected files like {', '.join(SUFFIXES[:3])}, or class folders")
    return paths


def _read_labels(table: Path) -> tuple[list[Path], list[int]]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns, rows = list(reader.fieldnames or []), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{table} can't be read as CSV ({error}): expected file,class_index lines") from error
    if not {"file", "class_index"} <= set(columns):
        raise FileError(
            f"{table}: expected file,class_index as the first line, got {shown(','.join(columns)) or 'nothing'}"
        )
    if not rows:
        raise FileError(f"{table} names no images: expected lines like 000.jpg,7")
    paths, labels = [], []
    for number, row in enumerate(rows, start=2):
        index = (row["class_index"] or "").strip()
        if not re.fullmatch(r"[0-9]{1,9}", index):
            raise FileError(f"{table} line {number}: expected a class index (0, 1, ...), got {shown(repr(index))}")
        paths.append(table.parent / (row["file"] or "").strip())
        labels.append(int(index))
    missing = [path for path in paths if not (exists(path) and path.is_file())]
    if missing:
        raise FileError(
            f"{table} names {len(missing)} missing files (such as {shown(missing[0].name)}) of {len(paths)}: "
            "add them, or remove their lines"
        )
    return paths, labels


def _class_indices(root: Path, names: list[str]) -> list[int]:
    """Sorted folders are the classes in order; ImageNet's (WordNet ids) keep their index among the 1000."""
    if len(names) == 1000 or not _are_imagenet(names):
        return list(range(len(names)))
    advice = "put a labels.csv (file,class_index) into the folder"
    try:
        timm_data: Any = importlib.import_module("timm.data")
    except ModuleNotFoundError as error:
        raise FileError(
            f"{root} has {len(names)} of ImageNet's 1000 class folders, whose indices timm knows: "
            f"pip install stainlock[timm], or {advice}"
        ) from error
    table = {name: index for index, name in enumerate(timm_data.ImageNetInfo().label_names())}
    unknown = [name for name in names if name not in table]
    if unknown:
        raise FileError(f"{root} has {unknown[0]}, which is not one of ImageNet's 1000 classes: {advice}")
    return [table[name] for name in names]
