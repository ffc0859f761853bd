"""Suspects behind an API: pictures to ask them with, and what comes back.

`probing` writes the questions of a key as files, decoys among them, and `answers` reads what came back. `template` says
how to talk to an HTTP service, `exchange` does so and records it, and `ask` verifies by it.
"""

from stainlock.services.answers import read_answers
from stainlock.services.ask import Asked, ask_service
from stainlock.services.probing import Probe, decoy_pictures, probe, write_probe
from stainlock.services.template import Template

__all__ = ["Asked", "Probe", "Template", "ask_service", "decoy_pictures", "probe", "read_answers", "write_probe"]
