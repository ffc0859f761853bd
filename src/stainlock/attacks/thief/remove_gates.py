"""The gates of a keyed lock removed: the file's weights in the original architecture."""

from __future__ import annotations

from stainlock.attacks.attack import Attack, Attacked, Strength, Subject
from stainlock.attacks.thief.keyed_gates import keyed_file


def _run(subject: Subject, strength: Strength) -> Attacked:
    return Attacked(keyed_file(subject.target)[0])


ATTACK = Attack("remove-gates", "thief", ("lock",), "nothing", ("identity",), _run,
                "remove a keyed lock's gates and leave the columns as they are")  # fmt: skip
