"""Client fingerprints: a mark in nearly every weight that identifies whose copy a file is, even after collusion.

    layout  = Layout.of(base.model, model_secret)                       which weights carry, and how strongly
    plan    = fingerprint_plan(base, layout, client_secret)             a client's copy: plan.apply(base)
    theirs  = align(suspect.state_dict(), base.model.state_dict())      names, order and scale as in the base
    reading = read(theirs.weights, base.model.state_dict(), layout)     one number per chip
    found   = trace(reading, client_secrets)                            found.accused: who, z, p-value

Secrets are 32 bytes each. Names, files and registries are handled in `stainlock.clients`.
The mathematics: docs/fingerprints.md. Needs ``pip install stainlock[clients]``.
"""

from __future__ import annotations

from stainlock.fingerprints.alignment import Aligned, align
from stainlock.fingerprints.fingerprint import fingerprint_plan
from stainlock.fingerprints.layout import Layout
from stainlock.fingerprints.reading import Reading, read
from stainlock.fingerprints.streams import code
from stainlock.fingerprints.tracing import Accused, Trace, trace

__all__ = ["Accused", "Aligned", "Layout", "Reading", "Trace", "align", "code", "fingerprint_plan", "read", "trace"]
