"""Outputs that appear together, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stainlock.key import Key
    from stainlock.kits.kit import Kit
    from stainlock.target import Target


class Outputs:
    """A verb's outputs: see `stainlock.storage.staging.Staging`."""

    def __init__(self, paths: Sequence[Path]) -> None:
        from stainlock.storage.staging import Staging

        self._staging = Staging(paths)

    def __enter__(self) -> Outputs:
        self._staging.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._staging.__exit__(kind)

    def place(self, path: Path) -> Path:
        """The temporary path for what will be at ``path``."""
        return self._staging.place(path)

    def folder(self, path: Path, *, secret: bool = False) -> Path:
        """The same for a folder, which is created, with a mode that does not depend on the umask."""
        folder = self.place(path)
        folder.mkdir()
        folder.chmod(0o700 if secret else 0o755)
        return folder

    def model(self, path: Path, target: Target) -> None:
        """Write a bundle, or an ONNX file if the model came from one."""
        from stainlock.exports.onnx_copy import write_onnx_copy
        from stainlock.models.bundle import write_bundle
        from stainlock.storage.onnx_files import is_onnx

        if is_onnx(target.reference or ""):
            write_onnx_copy(target, self.place(path))
        else:
            write_bundle(target, self.folder(path))

    def kit(self, path: Path, target: Target, key: Key | None, format: str | None) -> Kit:
        """Write a client kit. ``key`` is the lock's, None for a stained model: its kit says nothing of the stain."""
        from stainlock.kits.kit import write_kit

        return write_kit(target, self.folder(path), key=key, format=format)

    def commit(self) -> None:
        """Put everything in place; if anything goes wrong, undo it all."""
        self._staging.commit()
