"""One case: a file in a folder of its own, read with a limit of time. What came of it is told, not raised."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from formats import Format

from stainlock import StainlockError

SECONDS = 20


class Hang(BaseException):
    """Reading took too long; no reader may catch it."""


def outcome(one: Format, content: bytes) -> str:
    """``accepted``, ``refused``, or what no file may cause, as ``foreign: ...``.

    Refused is an error of ours, or ValueError as wrong arguments are, in one line.
    """
    folder = _folder()
    try:
        path = folder / one.file
        path.write_bytes(content)
        with _limited():
            one.use(path)
    except (StainlockError, ValueError) as error:
        ours = isinstance(error, StainlockError) or str(error).startswith(("expected", "the "))
        if ours and "\n" not in str(error) and len(str(error)) < 1000:
            return "refused"
        return f"foreign: {type(error).__name__}: {str(error)[:300]!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of a library written in Rust is no Exception
        return f"foreign: {type(error).__name__}: {str(error)[:300]!r}"
    finally:
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return "accepted"


@functools.cache
def _folder() -> Path:
    """One for all cases of a process, empty between them, in memory where that can be had."""
    memory = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="stainlock-fuzz-", dir=memory if os.access(memory, os.W_OK) else None)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
