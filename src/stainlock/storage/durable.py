"""Durable writing: files appear complete or not at all, and what was reported as written is on the disk."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stainlock.errors import FileError

STAGING = ".stainlock"  # suffix of staging folders


def refuse_existing(path: Path) -> None:
    """Fail now, before hours of work, if the path exists or can't be written."""
    if path.exists() or path.is_symlink():
        raise FileError(f"{path} exists already: choose another path or remove it")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise FileError(f"can't write {path}: {parent} is not a writable folder")


def write_file(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Write a file atomically and sync it to disk; secrets are readable only by their owner, whatever the umask."""
    with writing(path):
        make_folder(path.parent)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.chmod(temporary, 0o600 if secret else 0o644)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in errors of the operating system, such as a full disk."""
    try:
        yield
    except OSError as error:
        raise FileError(f"can't write {final_name(path)} ({error.strerror or error})") from error


def final_name(path: Path) -> Path:
    """Where a path in a staging folder will end up."""
    return Path(*(part for part in path.parts if not (part.startswith(".") and part.endswith(STAGING))))


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its missing parents; returns the folders that were made, outermost first."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        sync_folder(place.parent)
    return missing[::-1]


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk: otherwise a file in it may be lost although its content was synced."""
    if os.name == "nt":  # not possible on Windows
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # the file system does not support it
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Sync a file, or a folder with everything in it, to disk."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            _sync_file(Path(folder) / name)
        with writing(Path(folder)):
            sync_folder(Path(folder))
    if not path.is_dir():
        _sync_file(path)


def _sync_file(path: Path) -> None:
    with writing(path), path.open("rb") as file:
        os.fsync(file.fileno())


def claim(file: Any, taken: str) -> None:
    """Keep other runs out until the file or descriptor is closed, at the latest when the process ends, however it ends.

    ``taken`` is the error message if another run holds it already.
    """
    try:
        import fcntl
    except ImportError:  # on Windows nothing keeps two runs apart
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileError(taken) from error
