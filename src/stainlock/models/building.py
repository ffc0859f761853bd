"""Helpers to build another package's models: import it, report failures in one line, keep it quiet."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from typing import Any

from stainlock.errors import FileError, ModelError
from stainlock.storage.weights import one_line


def imported(module: str, install: str) -> Any:
    library = module.partition(".")[0]
    try:
        with redirect_stdout(sys.stderr):  # ultralytics prints a greeting on its first import
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise ModelError(f"{library} can't be imported ({error}): pip install {error.name}") from error
        raise ModelError(f"these models need {library}, which is not installed: pip install {install}") from error


@contextmanager
def failures_told(reference: str) -> Iterator[None]:
    try:
        yield
    except FileError:
        raise
    except Exception as error:
        raise ModelError(f"{reference} can't be built: {one_line(error)}") from error


@contextmanager
def quiet(library: str) -> Iterator[None]:
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def without_bars(logging: Any) -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
