"""The `stainlock` command: its verbs, and how errors and interrupts are handled."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from stainlock import __version__
from stainlock.cli.mistakes import advice
from stainlock.cli.report import printable
from stainlock.errors import StainlockError

# Each verb is `command` in the module of the same name in this package.
VERBS = (
    "inspect",
    "stain",
    "lock",
    "unlock",
    "export",
    "clients",
    "probe",
    "verify",
    "commit",
    "protect",
    "evaluate",
    "certify",
    "attack",
    "diff",
    "apply",
    "reproduce",
    "demo",
)
ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells report it; status 1 is a negative verdict
DEBUG = "STAINLOCK_DEBUG"


class _Interrupted(Exception):
    """Ctrl-C."""


class _ReaderLeft(Exception):
    """The reader of our output has closed the pipe."""


@contextmanager
def _before_click_handles_it() -> Iterator[None]:
    """Act before click does: it prints an empty line on Ctrl-C, and exits with 1, a verdict, on a broken pipe."""
    try:
        yield
    except KeyboardInterrupt:
        raise _Interrupted from None
    except BrokenPipeError:
        raise _ReaderLeft from None


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"stainlock.cli.{cmd_name}").command
        return command

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with _before_click_handles_it():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _before_click_handles_it():
            return super().invoke(ctx)


@click.command(cls=_Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stainlock", message="%(prog)s %(version)s")
@click.pass_context
def stainlock(context: click.Context) -> None:
    """Stain trained vision models to prove later that they are yours, and lock them so that only clients with the
    patch can use them.

    MODEL is torchvision:NAME, timm:NAME, smp:NAME, transformers:CLASS, hf:DIR, ultralytics:FILE, FILE.onnx,
    FILE.py:FACTORY, or a bundle directory.

    Exit status: 0 for success or a positive verdict, 1 for a negative verdict, 2 for an error.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old terminal shows ? for Δ instead of failing
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")  # libraries' warnings are meant for developers
            status = stainlock.main(arguments, prog_name="stainlock", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except (_Interrupted, KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    except (_ReaderLeft, BrokenPipeError):
        # The reader has closed the pipe: at exit Python would flush into it once more and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" (see {context.command_path} --help)" if context else ""
        return _fail(f"error: {error.format_message()}{advice(error)}{where}")
    except (StainlockError, ValueError) as error:
        return _fail(f"error: {error}")
    except OSError as error:
        return _fail(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
    except BaseException as error:  # Python would exit with status 1, which is a verdict
        return _fail(f"error: unexpected {type(error).__name__}: {error} ({DEBUG}=1 shows where)")


def _fail(message: str, status: int = ERROR) -> int:
    if os.environ.get(DEBUG) == "1":
        for line in traceback.format_exc().splitlines():
            click.echo(printable(line), err=True)
    click.echo(printable(" ".join(message.split())), err=True)
    return status
