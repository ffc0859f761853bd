"""What a verb prints: its result once, on stdout; remarks and progress on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

    from stainlock.clients.evidence import Accused
    from stainlock.verification import Verdict

# Unicode marks, isolates and overrides of text direction, which are always escaped.
_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_SMALL = 1e-4  # p-values below it are printed as powers of ten
_PIPE_WIDTH = 200  # columns, if the output is not a terminal


class Report:
    """Prints text, or one JSON object. Inside its ``with``, anything else that is printed goes to stderr."""

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet
        self._stdout: TextIO = sys.stdout
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Report:
        self._stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def result(self, facts: Mapping[str, Any], *lines: RenderableType) -> None:
        """Print the outcome: all facts as JSON, or the lines."""
        if self.as_json:
            self._stdout.write(json.dumps(_finite(facts), indent=2, allow_nan=False) + "\n")
        else:
            console = _console(self._stdout)
            for line in lines:
                console.print(line)
        self._stdout.flush()

    def remark(self, *lines: RenderableType) -> None:
        """Print hints for people; ``--quiet`` and ``--json`` leave them out."""
        if not (self.quiet or self.as_json):
            console = _console(sys.stderr)
            for line in lines:
                console.print(line)

    @contextlib.contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None] | None]:
        """A progress bar on a terminal; None in a pipe or with ``--quiet``, so that no progress is computed."""
        if self.quiet or not sys.stderr.isatty():
            yield None
            return
        from rich.progress import Progress

        with Progress(console=_console(sys.stderr), transient=True) as bars:
            bar = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)


def chance(found: Verdict | Accused) -> str:
    """A p-value as text, "p = 0.02" or "p ≤ 1e-30"."""
    relation = "=" if found.p_value >= _SMALL else "≤"
    return f"p {relation} {rounded(found.p_value, found.log10_p_value)}"


def rounded(p_value: float, log10_p_value: float) -> str:
    """The number alone; very small ones are rounded up to a power of ten."""
    return f"{p_value:.2g}" if p_value >= _SMALL else f"1e{math.ceil(log10_p_value)}"


def printable(text: str) -> str:
    """The text on one line without anything a terminal acts on: files and the names in them may come from strangers.

    Control characters, line separators and marks that reorder text are escaped, for example as ``\\x1b``.
    """
    return "".join(c if c == " " or (c.isprintable() and c not in _REORDERING) else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _console(stream: TextIO) -> Console:
    from rich.console import Console
    from rich.text import Text

    class Plain(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)  # every line, cell and heading passes through here

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with status 1, which is a verdict

    # Names of models and files are shown as they are: no markup, no emoji.
    width = None if stream.isatty() else _PIPE_WIDTH
    return Plain(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
