"""A leaked key: the owner gives the client a new lock, which the leaked trigger no longer opens.

The row's ``unlocked`` is the new lock's accuracy with the old trigger, ``new_trigger`` with the new one.
"""

from __future__ import annotations

from typing import Any

import torch

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject
from stainlock.facts import ConvolutionalFacts
from stainlock.locks import lock
from stainlock.target import evaluation_mode


def _run(subject: Subject, strength: Strength) -> Attacked:
    key = subject.need_key()
    base = key.original(subject.target)
    options: dict[str, Any] = {}
    if key.schema == "squeeze-excite":
        options["gates"] = max(1, len(ConvolutionalFacts.of(key).disruptors))
    seed = int(subject.randomness.secret("the new lock").integers(2**62))
    locked, new = lock(base, kind=key.schema, seed=seed, **options)
    figures = {}
    if subject.images is not None and subject.labels is not None:
        paste = new.unlock_transform(normalise=False)
        with evaluation_mode(locked.model), torch.inference_mode():
            pairs = zip(subject.images.split(32), subject.labels.split(32), strict=True)
            hits = sum(int((locked.predict(paste(x)).argmax(1).cpu() == y).sum()) for x, y in pairs)
        figures["new_trigger"] = hits / len(subject.labels)
    return Attacked(locked, note="unlocked: the leaked trigger on the new lock", figures=figures)


ATTACK = Attack("leaked-key", "paper", ("lock",), "nothing", ("replaced",), _run,
                "try the leaked trigger on the lock that replaced the old one")  # fmt: skip
