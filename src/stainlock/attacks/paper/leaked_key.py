"""A leaked key: the owner replaces the client's lock by another, and the leaked trigger opens nothing any more.

The row's ``unlocked`` is with the old trigger in the new lock; ``new_trigger`` is with the new one.
"""

from __future__ import annotations

from typing import Any

import torch

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject
from stainlock.locks import lock
from stainlock.target import evaluation_mode


def _run(subject: Subject, strength: Strength) -> Attacked:
    key = subject.need_key()
    details = key.details
    base = key.original(subject.target)
    options: dict[str, Any] = {}
    if key.schema == "squeeze-excite":
        options["gates"] = max(1, len(details.get("disruptors", [1])))
    seed = int(subject.randomness.secret("the new lock").integers(2**62))
    locked, new = lock(base, kind=key.schema, seed=seed, **options)
    figures = {}
    if subject.images is not None and subject.labels is not None:
        paste = new.unlock_transform(normalise=False)
        with evaluation_mode(locked.model), torch.inference_mode():
            pairs = zip(subject.images.split(32), subject.labels.split(32), strict=True)
            hits = sum(int((locked.predict(paste(x)).argmax(1).cpu() == y).sum()) for x, y in pairs)
        figures["new_trigger"] = hits / len(subject.labels)
    return Attacked(locked, note="unlocked is with the leaked trigger, in the lock that replaced it", figures=figures)


ATTACK = Attack("leaked-key", "paper", ("lock",), "nothing", ("replaced",), _run,
                "the old trigger on the lock that replaced it")  # fmt: skip
