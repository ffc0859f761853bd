"""The command line: one file per verb. To add a verb, add its file here and its name to `app.VERBS`."""

from stainlock.cli.app import main

__all__ = ["main"]
