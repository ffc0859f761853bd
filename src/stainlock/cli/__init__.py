"""The command line: one file a verb. A new verb is its file here and its name in `app.VERBS`."""

from stainlock.cli.app import main

__all__ = ["main"]
