"""All outputs of one command: written next to their final paths, then moved there together.

The output ``DIR/NAME`` is first written to ``DIR/.NAME.stainlock/NAME``. When everything is written and synced to disk,
an empty file ``committed`` is created in the first output's staging folder. From then on the outputs count as made, and
they are renamed. A later run that finds a staging folder which no running process holds completes the renames if
``committed`` exists, and clears the folder if not. A lock on the folder keeps two runs for the same output apart.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from stainlock.errors import FileError
from stainlock.storage.durable import (
    STAGING,
    claim,
    make_folder,
    refuse_existing,
    sync_folder,
    sync_tree,
    write_file,
    writing,
)

_COMMITTED, _OUTPUTS = "committed", "outputs.json"
_ATTEMPTS = 100  # tries to claim a folder that another run may be removing


class Staging:
    """Output paths, checked before the work. What is written for them stays in staging folders until `commit` moves it.

    As a context manager it leaves nothing behind, not even a folder it made, unless `commit` succeeded.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.absolute() for path in paths]
        self._staged: list[Path] = []
        self._made: list[Path] = []  # folders that did not exist
        self._claimed: dict[Path, int | None] = {}
        for one, other in itertools.permutations([path.resolve() for path in paths], 2):
            if other == one:
                raise FileError(f"{one} is given for two outputs: choose different paths")
            if other.is_relative_to(one):
                raise FileError(f"{other} would be inside {one}: keep secrets and bundles apart")
        if not any(_folder(path).exists() for path in paths):  # otherwise an interrupted run is handled first
            for path in paths:
                refuse_existing(path)

    def __enter__(self) -> Staging:
        try:
            finished: list[Path] = []
            for path in self._paths:
                with writing(path):
                    finished += self._claim(path)
            for path in self._paths:
                if path in finished:
                    raise FileError(
                        f"{path} exists already: it is from an interrupted run, which was completed now; choose another"
                        " path or remove it"
                    )
                refuse_existing(path)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for path, descriptor in self._claimed.items():
            shutil.rmtree(_folder(path), ignore_errors=True)
            if descriptor is not None:
                os.close(descriptor)
        if kind is not None:
            for folder in reversed(self._made):
                with suppress(OSError):  # someone else may have put a file into it
                    folder.rmdir()

    def place(self, path: Path) -> Path:
        """The temporary path to write, for an output that will be at ``path``."""
        path = path.absolute()
        self._staged.append(path)
        return _place(path)

    def commit(self) -> None:
        """Move all outputs into place; if anything goes wrong, undo all of it."""
        if not self._staged:
            return
        listed = json.dumps([str(path) for path in self._staged]).encode()
        for path in self._staged:
            sync_tree(_place(path))
            write_file(_folder(path) / _OUTPUTS, listed)
            with writing(path):
                sync_folder(path.parent)
            refuse_existing(path)
        mark = _folder(self._staged[0]) / _COMMITTED
        try:
            write_file(mark, b"")
            _complete(self._staged)
        except BaseException:
            mark.unlink(missing_ok=True)
            for path in self._staged:
                if not os.path.lexists(_place(path)) and os.path.lexists(path):  # this run has moved it
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            raise

    def _claim(self, path: Path) -> list[Path]:
        """Claim the staging folder for this run and empty it; returns the outputs of an earlier run it completed."""
        folder, descriptor = _folder(path), None
        for _ in range(_ATTEMPTS):
            self._made += make_folder(path.parent)
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                if os.name != "nt":
                    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:  # another run has just ended
                continue
            if descriptor is None:
                break
            try:
                claim(descriptor, f"another run is writing {path}: wait for it, or choose another path")
                if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
                    break
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        else:
            raise FileError(f"can't write {path}: other runs keep starting and ending there")
        self._claimed[path] = descriptor
        finished = _finish(folder)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        return finished


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill. It becomes ``path`` at the end, or is removed if anything goes wrong."""
    with Staging([path]) as staging:
        folder = staging.place(path)
        folder.mkdir()
        folder.chmod(0o755)  # whatever the umask
        yield folder
        staging.commit()


def _folder(path: Path) -> Path:
    return path.absolute().parent / f".{path.name}{STAGING}"


def _place(path: Path) -> Path:
    return _folder(path) / path.name


def _finish(folder: Path) -> list[Path]:
    """Complete the renames of an earlier run if it had committed; returns its outputs, or nothing if it had not."""
    try:
        listed = json.loads((folder / _OUTPUTS).read_text(encoding="utf-8"))
        paths = [Path(str(path)) for path in listed]
    except (OSError, ValueError, TypeError, RecursionError):
        return []
    if not paths or not (_folder(paths[0]) / _COMMITTED).is_file() or folder not in map(_folder, paths):
        return []
    _complete(paths)
    return paths


def _complete(paths: Sequence[Path]) -> None:
    """Rename the outputs that are still staged, the first one last, so that a bundle does not appear before its key."""
    for path in reversed(paths):
        if not os.path.lexists(_place(path)):
            continue
        if os.path.lexists(path):
            raise FileError(f"{path} exists, and an interrupted run left another in {_place(path)}: move one of them")
        with writing(path):
            with suppress(FileNotFoundError):  # another run may complete it at the same time
                os.rename(_place(path), path)
            sync_folder(path.parent)
    with writing(paths[0]):
        (_folder(paths[0]) / _COMMITTED).unlink(missing_ok=True)
        sync_folder(_folder(paths[0]))
