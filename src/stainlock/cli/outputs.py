"""Outputs that appear together, or not at all."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stainlock.errors import FileError

if TYPE_CHECKING:
    from stainlock.target import Target


class Outputs:
    """Paths checked before the work; what is written for them lies beside them until `commit` renames it.

    As a context manager it leaves nothing behind, not even a folder it made, unless `commit` went through.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        from stainlock.storage.files import refuse_existing

        self._staged: dict[Path, Path] = {}
        self._made: list[Path] = []  # folders that were not there
        self._temporary: list[Path] = []
        for path in paths:
            refuse_existing(path)
        for one, other in itertools.permutations([path.resolve() for path in paths], 2):
            if other == one:
                raise FileError(f"{one} is given for two outputs: choose different paths")
            if other.is_relative_to(one):
                raise FileError(f"{other} would lie within {one}: keep secrets and bundles apart")

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for folder in self._temporary:
            shutil.rmtree(folder, ignore_errors=True)
        if kind is not None:
            for folder in reversed(self._made):
                if not any(folder.iterdir()):
                    folder.rmdir()

    def place(self, path: Path) -> Path:
        """Where to write, for now, what is to be at ``path``."""
        parent = path.absolute().parent
        missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            self._made.append(folder)
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{path.name}."))
        self._temporary.append(temporary)
        self._staged[path] = temporary / path.name
        return self._staged[path]

    def bundle(self, path: Path, target: Target) -> None:
        from stainlock.models.bundle import write_bundle

        folder = self.place(path)
        folder.mkdir()
        write_bundle(target, folder)

    def commit(self) -> None:
        """Rename everything into place; whatever goes wrong, take it all back."""
        from stainlock.storage.files import refuse_existing

        done: list[Path] = []
        try:
            for path, place in self._staged.items():
                refuse_existing(path)
                done.append(path)
                os.rename(place, path)
        except BaseException:
            for path in done:
                if not self._staged[path].exists():  # it was moved, so it is ours
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            raise
