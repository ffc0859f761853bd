"""Suspects behind an API: pictures to send as questions, and the answers.

`probing` writes a key's questions as files, with decoys among them, and `answers` reads the answers. `template`
describes how to talk to an HTTP service, `exchange` does so and records it, and `ask` verifies the service.
"""

from stainlock.services.answers import read_answers
from stainlock.services.ask import Asked, ask_service
from stainlock.services.probing import Probe, decoy_pictures, probe, write_probe
from stainlock.services.template import Template

__all__ = ["Asked", "Probe", "Template", "ask_service", "decoy_pictures", "probe", "read_answers", "write_probe"]
