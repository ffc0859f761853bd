"""Our own error types. Each message is one line: what was expected, what came, what to do."""

from __future__ import annotations


class StainlockError(Exception):
    """Base class: the command line prints its message and exits with status 2."""


class ModelError(StainlockError):
    """A model, or its weights, can't be loaded or handled."""


class UnsupportedOp(ModelError):
    """A node of the traced graph has no op rule; nothing is guessed about it."""

    def __init__(self, node: str, op: str, advice: str) -> None:
        super().__init__(f"no rule for operation {op} at node {node}: {advice}")
        self.node, self.op = node, op


class SiteError(StainlockError):
    """A site does not exist, or can't carry what was asked of it."""


class TriggerError(StainlockError):
    """No trigger could be found that stands out from natural inputs."""


class FileError(StainlockError):
    """A key, bundle, delta or data folder is missing, damaged, or not what it should be."""


class SweepError(StainlockError):
    """A unit of a sweep failed, or its workers can't be had."""
