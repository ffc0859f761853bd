"""Our own error types. Each message is one line: what was expected, what was found, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StainlockError(Exception):
    """Base class of stainlock's errors. The command line prints the message and exits with status 2.

    >>> try:
    ...     sl.Key.load("nowhere.key")
    ... except sl.StainlockError as error:
    ...     print(error)
    can't read key file nowhere.key: No such file or directory
    """


class ModelError(StainlockError):
    """A model or its weights can't be loaded or handled.

    >>> sl.analyse(sl.Target(torch.nn.ReLU(), (3, 8, 8)))
    Traceback (most recent call last):
    stainlock.errors.ModelError: ReLU has no Linear, Conv2d or ConvTranspose2d that can be reached by tracing
    """


class UnsupportedOp(ModelError):
    """A node of the traced graph has no op rule; nothing is guessed about it.

    >>> error = sl.UnsupportedOp("roll", "torch.roll", "name a part of the model without it")
    >>> error.node, str(error)
    ('roll', 'no rule for operation torch.roll at node roll: name a part of the model without it')
    """

    def __init__(self, node: str, op: str, advice: str) -> None:
        super().__init__(f"no rule for operation {op} at node {node}: {advice}")
        self.node, self.op = node, op


class SiteError(StainlockError):
    """A site does not exist, or can't carry the requested stain or lock.

    >>> sl.stain(target, site="1")
    Traceback (most recent call last):
    stainlock.errors.SiteError: 1 is a BatchNorm2d: expected a Linear, Conv2d or ConvTranspose2d...
    """


class TriggerError(StainlockError):
    """No trigger was found that stands out from natural inputs.

    >>> dead = target.copy()
    >>> _ = dead.model[0].weight.data.zero_()
    >>> sl.stain(dead, site="3")
    Traceback (most recent call last):
    stainlock.errors.TriggerError: ...
    """


class FileError(StainlockError):
    """A key, bundle, delta or data folder is missing, damaged, or not what it should be.

    >>> sl.load_bundle("nowhere")
    Traceback (most recent call last):
    stainlock.errors.FileError: nowhere is not a bundle, it has no stainlock.json
    """


class SweepError(StainlockError):
    """A unit of a sweep failed, or its workers are not available.

    >>> issubclass(sl.SweepError, sl.StainlockError)
    True
    """


def meant(name: str, known: Iterable[str]) -> str:
    """A question that lists a few known names: those that end in this one, or else those spelled like it."""
    names = list(known)
    close = [n for n in names if n.endswith(f".{name}")] or difflib.get_close_matches(name, names, 3, 0.4)
    several = f" ({len(close)} end in {name})" if close[3:] else ""
    return f"did you mean {', '.join(close[:3])}?{several}" if close else ""
