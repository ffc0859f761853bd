"""Verification of a service: questions and decoys are sent in random order, one at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stainlock.evaluation.data import Images
from stainlock.html.images import png
from stainlock.key import Key
from stainlock.services.exchange import Record, Service
from stainlock.services.probing import check_pictures, decoy_pictures, on_canvas
from stainlock.services.template import Template
from stainlock.verification.questions import Labels, judged, pictures
from stainlock.verification.sequential import verify_sequentially
from stainlock.verification.verdict import SIGNIFICANCE, Verdict


@dataclass(frozen=True)
class Asked:
    """The verdict on a service and its cost: pictures sent, pictures saved by early stopping, and requests made."""

    verdict: Verdict
    queries: int
    queries_saved: int
    requests: int
    decoys: int
    decoys_right: int | None  # None if their classes are unknown
    record_digest: str
    first_answers: dict[int, Labels | None]  # by trigger, for those that were sent


def ask_service(
    url: str,
    template: Template,
    key: Key,
    *,
    top: int = 1,
    decoys: int = 0,
    data: Images | None = None,
    ask_all: bool = False,
    record: Path | None = None,
    significance: float = SIGNIFICANCE,
    progress: Callable[[int, int], None] | None = None,
) -> Asked:
    """Is the model behind this address stained with this key?

    Stops as soon as the verdict is clear, unless ``ask_all``. Decoys are spread evenly over the triggers, at random
    positions among their questions. ``record`` is a new file in which every exchange is recorded.
    """
    check_pictures(key)
    shown = pictures(key)
    natural, classes = decoy_pictures(key, decoys, data)
    each = shown.shape[1]
    log = Record(record)
    service = Service(url, template, log)
    order = random.SystemRandom()
    waiting = list(range(decoys))
    sent = right = known = 0
    first: dict[int, Labels | None] = {}

    def send(levels: object) -> Labels | None:
        nonlocal sent
        sent += 1
        answer = service.ask(png(on_canvas(levels, template.canvas)))  # type: ignore[arg-type]
        if progress:
            progress(sent, len(shown) * each + decoys)
        return answer

    def ask(questions: Sequence[tuple[int, int]]) -> list[Labels | None]:
        nonlocal right, known
        if questions[0][1] == 0:  # a new trigger: takes its share of the remaining decoys
            left = len(shown) - questions[0][0]
            mixed: list[tuple[int, int] | int] = [*questions, *(waiting.pop() for _ in range(-(-len(waiting) // left)))]
        else:
            mixed = [*questions]
        order.shuffle(mixed)
        answers: dict[tuple[int, int], Labels | None] = {}
        for one in mixed:
            if isinstance(one, tuple):
                answers[one] = send(shown[one])
                if one[1] == 0:
                    first[one[0]] = answers[one]
                continue
            labels = send(natural[one])
            if classes[one] is not None:
                known += 1
                right += labels is not None and labels[:1] == [classes[one]]
        return [answers[question] for question in questions]

    try:
        if ask_all:
            given = [ask([(i, q) for q in range(each)]) for i in range(len(shown))]
            verdict, saved = judged(key, given, top=top, significance=significance), 0
        else:
            found = verify_sequentially(ask, key, look_alikes=each - 1, top=top, significance=significance)
            verdict, saved = found.verdict, found.saved
    finally:
        log.close()
    asked_decoys = decoys - len(waiting)
    return Asked(verdict, sent, saved, len(log.lines), asked_decoys, right if known else None, log.digest, first)
